"""Every setting of a run, each default written once.

The tree is validated as a whole (`loading.validate`). Importing this loads neither torch nor ray, so `--help` and `--dry-run` answer at
once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)


def _numbers(value: Any) -> Any:
    """`0,770,8192` as typed on a command line becomes a list; everything else is left for pydantic to judge."""
    if isinstance(value, str) and value not in ("auto", ""):
        try:
            return [int(part) for part in value.replace(" ", "").split(",")]
        except ValueError:
            raise ValueError(f"{value!r} is no list of whole numbers, for instance 0,770,8192") from None
    return value


def _path(value: Path) -> Path:
    if "\0" in str(value):
        raise ValueError("holds a NUL; no path does")
    return value.expanduser()


UserPath = Annotated[Path, AfterValidator(_path)]
AutoIntList = Annotated[Literal["auto"] | list[int], BeforeValidator(_numbers)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class RunConfig(Section):
    name: str = Field("dflash", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="name of the run, its folder and its actors")
    dir: UserPath | None = Field(None, description="run folder; default runs/NAME, or ~/dflash_ray/runs/NAME under `ray job submit`")
    seed: int = Field(0, ge=0, lt=2**31)
    max_steps: int | None = Field(None, ge=1, description="stop after this many optimizer steps; never changes the schedule")
    resume: str = Field("never", description="never, auto (newest whole checkpoint of the run folder) or a checkpoint folder")
    fresh: bool = Field(False, description="delete what the run folder holds and start over")


class TargetConfig(Section):
    path: UserPath | None = Field(None, description="Hugging Face folder of the frozen target")
    shape: str | None = Field(None, description="a known shape (qwen3.6-27b): explains or benchmarks a run without a folder")
    weights: Literal["checkpoint", "random"] = Field("checkpoint", description="random: benchmark weights at target.shape")
    precision: Literal["auto", "float32", "bf16", "fp8"] = Field("auto", description="auto: bf16 on a GPU, float32 on a CPU")
    layout: Literal["auto", "packed", "padded"] = Field("auto", description="how one batch is laid out in the target's forward pass")
    require_fast_path: bool = Field(False, description="stop where a GPU target's kernels fail their self-test, instead of going on slower")


class DraftConfig(Section):
    init: str = Field("random", description="random, or the folder of an exported drafter to start from")
    block_size: int = Field(16, ge=2, le=64, description="K: the anchor and K-1 masked slots")
    num_layers: int = Field(5, ge=1, le=64)
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = Field(None, description="one per layer; default all full")
    sliding_window: int | None = Field(None, ge=1)
    num_attention_heads: int | None = Field(None, ge=1, description="default hidden / 128 (/ 64 below hidden 2,048)")
    num_key_value_heads: int | None = Field(None, ge=1, description="default a quarter of the heads, rounded to a divisor")
    head_dim: int | None = Field(None, ge=2, description="default 128 (64 below hidden 2,048)")
    intermediate_size: int | None = Field(None, ge=1, description="default the target's")
    target_layer_ids: AutoIntList = Field("auto", description="taps: target layers whose output is read; auto: num_taps of them by rule")
    num_taps: int = Field(5, ge=1, le=64, description="how many taps `target_layer_ids: auto` picks")
    mask_token_id: int | None = Field(None, ge=0, description="fills slots 1..K-1; default: the target tokenizer's mask token")

    @model_validator(mode="after")
    def _consistent(self) -> DraftConfig:
        if self.layer_types is not None and len(self.layer_types) != self.num_layers:
            raise ValueError(f"layer_types has {len(self.layer_types)} entries for num_layers {self.num_layers}; give one per layer")
        if self.layer_types and "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise ValueError("layer_types has sliding_attention but sliding_window is not set; set it, for instance to 2048")
        return self


class DataConfig(Section):
    path: UserPath | None = Field(None, description="dataset folder made by jobs.prepare_data, or saved by Hugging Face datasets")
    columns: dict[str, str] = Field(default_factory=dict, description="our column name -> the folder's column name")
    samples: int | None = Field(None, ge=1, description="for --dry-run where the dataset is not: how many samples")
    tokens: int | None = Field(None, ge=1, description="for --dry-run where the dataset is not: tokens of one epoch")


class BatchingConfig(Section):
    strategy: Literal["auto", "packed", "bucketed", "random", "sorted"] = Field(
        "auto", description="auto: packed where the target isolates documents"
    )
    token_budget: int = Field(16384, ge=1, description="most tokens a target allocates for one batch, padding included")
    max_rows: int = Field(64, ge=1, le=1024, description="most documents per batch of the padded strategies")
    buckets: int = Field(6, ge=1, le=64)
    edges: AutoIntList = Field("auto", description="bucket edges, 0 first; bucket i holds lengths in (e_i, e_i+1]")
    lookahead: int = Field(1024, ge=2, description="packed: documents the first-fit may choose from")
    grid: int = Field(32, ge=1, description="edges auto: distance of candidate edges in tokens")
    speed: dict[PositiveInt, PositiveFloat] = Field(
        default_factory=lambda: {16384: 10292.0, 32768: 10401.0, 65536: 10245.0},
        min_length=1,
        description="measured target speed: allocated tokens of one batch -> allocated tokens per second",
    )


class AnchorConfig(Section):
    tokens_per_anchor: float = Field(43.0, gt=0, description="a document of n tokens gets max(1, round(n / this)) anchors")


class LossConfig(Section):
    ce: float = Field(0.0, ge=0, description="weight of hard-label cross-entropy with decay exp(-(k-1)/gamma)")
    dpace: float = Field(1.0, ge=0, description="weight of D-PACE")
    dpace_kl: float = Field(0.0, ge=0, description="weight of D-PACE with KL to the target's own distribution instead of cross-entropy")
    kl: float = Field(0.0, ge=0, description="weight of KL to the target's own distribution (the target then runs all layers)")
    tv: float = Field(0.0, ge=0, description="weight of total variation to the target's own distribution")
    gamma: float | None = Field(None, gt=0, description="default by block size: 4 for 8, 5 for 10, 7 for 16")
    alpha: float = Field(0.5, ge=0, le=1, description="D-PACE: s = alpha * q + 1 - alpha")

    @model_validator(mode="after")
    def _some(self) -> LossConfig:
        if not (self.by_weight or self.by_anchors):
            raise ValueError("ce, dpace, dpace_kl, kl and tv are all 0; give at least one a positive weight")
        return self

    @property
    def needs_teacher(self) -> bool:
        return self.kl > 0 or self.tv > 0 or self.dpace_kl > 0

    @property
    def by_weight(self) -> bool:
        """Is something divided by the step's weight sum?"""
        return self.ce + self.kl + self.tv > 0

    @property
    def by_anchors(self) -> bool:
        """Is something divided by the step's anchors?"""
        return self.dpace + self.dpace_kl > 0


class NoiseConfig(Section):
    start: float = Field(0.0, ge=0, description="std of feature noise in units of each tap's RMS, at step 0")
    end: float = Field(0.0, ge=0)
    steps: int | None = Field(None, ge=1, description="linear from start to end over this many steps; default all steps")


class OptimizerConfig(Section):
    name: Literal["adamw", "muon"] = Field("adamw", description="muon: Muon for matrices, AdamW for vectors")
    lr: float = Field(6e-4, gt=0, description="peak rate of AdamW groups")
    muon_lr: float = Field(2e-2, gt=0, description="peak rate of Muon's matrices")
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0)
    clip: float = Field(1.0, gt=0, description="global gradient norm is clipped to this")

    @field_validator("betas")
    @classmethod
    def _betas(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError(f"{list(value)}: both must lie in [0, 1)")
        return value


class ScheduleConfig(Section):
    name: Literal["cosine", "linear", "wsd"] = "cosine"
    warmup: float = Field(0.04, ge=0, lt=1, description="share of all steps")
    decay: float = Field(0.2, gt=0, le=1, description="wsd: share of all steps in the final decay")


class TrainConfig(Section):
    epochs: int = Field(1, ge=1, le=1000)
    batches_per_step: int = Field(1, ge=1, description="consecutive batches whose gradients make one optimizer step")
    precision: Literal["auto", "float32", "bf16"] = Field("auto", description="matmuls; master weights, moments and losses are float32")
    head_chunk: int = Field(2048, ge=1, description="label rows whose logits exist at one time")
    ema: float | None = Field(None, gt=0, lt=1, description="decay of averaged weights used by validation and export")
    max_skipped_steps: int = Field(10, ge=1, description="non-finite steps in a row before the run stops")


class FlowConfig(Section):
    window: int | None = Field(None, ge=1, description="batches past the next one to train that may compute; default 2 x targets + 2")
    window_bytes: int | None = Field(None, ge=1, description="bytes of features in flight; default 0.7 of the object store")
    prefetch_batches: int = Field(50, ge=1)
    queue_per_target: int = Field(1, ge=0)
    slow_factor: float = Field(3.0, gt=1, description="a target slower than this times the median gets no batch that holds up the line")
    restarts_per_hour: int = Field(20, ge=0, description="per actor; past it the run goes on without that actor")
    deadline_factor: float = Field(20.0, gt=1, description="an actor that takes longer than this times its median counts as hung")
    deadline_min_seconds: float = Field(30.0, gt=0, description="no actor counts as hung before")
    deaths_per_batch: int = Field(3, ge=1, description="a batch that this many attempts could not compute is set aside")
    max_set_aside_in_a_row: int = Field(5, ge=1, description="batches set aside in a row before the run stops")
    cross_check_every: int = Field(0, ge=0, description="every this many batches another target must get the same features; 0: never")


class TransportConfig(Section):
    kind: Literal["auto", "object_store", "direct"] = Field(
        "auto", description="how features travel: direct reads the target's GPU on one host; auto tries it at start and falls back"
    )
    slots: int = Field(3, ge=1, description="direct: buffers on each target's GPU, each as large as the largest batch's features")


class CheckpointConfig(Section):
    every_steps: int = Field(500, ge=1)
    every_minutes: float = Field(10.0, gt=0)
    keep: int = Field(3, ge=1)


class ValidationConfig(Section):
    every_steps: int = Field(500, ge=1)
    batches: int = Field(8, ge=0, description="most validation batches per pass; 0 turns validation off")
    tokens_per_anchor: float | None = Field(
        None, gt=0, description="default anchors.tokens_per_anchor; 1: a block at every place, which also gives replay_tau"
    )


class GenerationConfig(Section):
    engine: Literal["auto", "transformers", "vllm"] = "auto"
    batch_size: int = Field(64, ge=1)


class TrackingConfig(Section):
    kind: Literal["none", "wandb", "tensorboard"] = Field(
        "none", description="wandb: also to Weights & Biases, offline in the run folder without a key; tensorboard: files in the run folder"
    )
    project: str = "dflash-ray"


class PowerConfig(Section):
    source: str = Field(
        "nvml", pattern=r"^(nvml|none|file:.+)$", description="nvml: the GPUs' own sensors; file:PATH: lines of DEVICE WATTS; none"
    )
    budget_watts: float | None = Field(None, gt=0, description="above it targets are parked, one at a time; no device setting is changed")
    wake_below: float = Field(0.9, gt=0, lt=1, description="a parked target wakes below this share of the budget")
    every_seconds: float = Field(1.0, gt=0, description="how often power and the actors' memory are read")

    @model_validator(mode="after")
    def _readable(self) -> PowerConfig:
        if self.budget_watts is not None and self.source == "none":
            raise ValueError("budget_watts needs a source of watts; set source to nvml or file:PATH")
        return self

    @property
    def file(self) -> Path | None:
        return Path(self.source.removeprefix("file:")).expanduser() if self.source.startswith("file:") else None


class CpuConfig(Section):
    threads_per_actor: int = Field(1, ge=1, description="the same in every topology, so that results are bit for bit equal")


class PlacementConfig(Section):
    gpus_per_target: float = Field(1.0, gt=0, description="a fraction lets actors share one GPU")
    gpus_per_drafter: float = Field(1.0, gt=0)
    target_resources: dict[str, PositiveFloat] = Field(default_factory=dict, description="custom Ray resources that choose targets' nodes")
    drafter_resources: dict[str, PositiveFloat] = Field(default_factory=dict, description="the same for the drafter")


class HardwareConfig(Section):
    gpu_memory_gib: float | None = Field(None, gt=0, description="for --dry-run on another machine")
    shm_gib: float | None = Field(None, gt=0)
    target_tokens_per_second: float | None = Field(None, gt=0, description="of one target, for the days that --dry-run prints")
    drafter_tokens_per_second: float | None = Field(None, gt=0)


class DebugConfig(Section):
    no_peer_access: bool = Field(False, description="the direct way is found not to work, as on cards without peer access")
    target_delay_seconds: float = Field(0.0, ge=0, description="each target sleeps a seeded random time up to this before a batch")
    target_delays: dict[str, float] = Field(default_factory=dict, description="target's name -> seconds it sleeps before a batch")
    deadly_batches: list[int] = Field(default_factory=list, description="training batches whose computation kills the target's process")
    bad_batches: list[int] = Field(default_factory=list, description="training batches whose features are not finite")
    deviant_target: str | None = Field(None, description="name of a target that computes wrong features")


class Config(Section):
    run: RunConfig = RunConfig()
    topology: str = Field("1-1", description="TARGETS-DRAFTERS, for instance 6-1")
    target: TargetConfig = TargetConfig()
    draft: DraftConfig = DraftConfig()
    data: DataConfig = DataConfig()
    batching: BatchingConfig = BatchingConfig()
    anchors: AnchorConfig = AnchorConfig()
    loss: LossConfig = LossConfig()
    noise: NoiseConfig = NoiseConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig = TrainConfig()
    flow: FlowConfig = FlowConfig()
    transport: TransportConfig = TransportConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    validation: ValidationConfig = ValidationConfig()
    generation: GenerationConfig = GenerationConfig()
    tracking: TrackingConfig = TrackingConfig()
    power: PowerConfig = PowerConfig()
    cpu: CpuConfig = CpuConfig()
    placement: PlacementConfig = PlacementConfig()
    hardware: HardwareConfig = HardwareConfig()
    debug: DebugConfig = DebugConfig()

    @field_validator("topology")
    @classmethod
    def _topology(cls, value: str) -> str:
        parts = value.split("-")
        if len(parts) != 2 or not all(part.isascii() and part.isdigit() and len(part) <= 5 for part in parts):
            raise ValueError(f"{value!r} is not TARGETS-DRAFTERS, for instance 6-1")
        targets, drafters = map(int, parts)
        if targets < 1:
            raise ValueError(f"{value!r} has no target; use at least 1-1")
        if drafters != 1:
            raise ValueError(f"{value!r} has {drafters} drafters; exactly 1 drafter trains, use {targets}-1")
        return value

    @property
    def targets(self) -> int:
        return int(self.topology.split("-")[0])

    def as_dict(self) -> dict[str, Any]:
        """Plain YAML-able values; `load_config` of it gives an equal tree."""
        return self.model_dump(mode="json")
