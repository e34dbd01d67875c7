"""Trains one drafter: micro-steps that add gradients, optimizer steps that divide and use them.

What it promises:

- the same batches in the same order give the same bits on a CPU at equal threads, also across `state_dict` and `load_state_dict`;
- gradients are summed unnormalised in float32 and divided once per optimizer step, so how a step is cut into batches changes nothing:
  ce, kl and tv by the step's weight sum, dpace and dpace_kl by its valid anchors. A mixture of both kinds keeps two sums of gradients,
  because neither divisor nor their ratio is known before the step's last batch;
- a step without a label or with a non-finite gradient changes no weight, is reported, and still counts as a step;
- received features are never written to.

On a GPU the passes are `fused`, and what a batch needs there is made by `stage`, on a stream of its own, while another batch trains. A
micro-step waits for the device once, for its sums, when its backward pass is queued; so the next batch's work is queued behind it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_ray.config.schema import Config
from dflash_ray.data.batches.batch import Batch
from dflash_ray.draft.arrival import FeatureError, Staged, check_features
from dflash_ray.draft.async_scalars import AsyncScalars
from dflash_ray.draft.blocks.labels import Labels, decay_gamma
from dflash_ray.draft.blocks.mask import Blocks
from dflash_ray.draft.dflash.export import check_warm_start, read_tensors
from dflash_ray.draft.dflash.fused import FusedPass, GradientSums, fused_covers
from dflash_ray.draft.dflash.model import DraftModel, initialise
from dflash_ray.draft.dflash.shape import DraftShape
from dflash_ray.draft.loss import block_losses, empty_sums, step_metrics
from dflash_ray.draft.noise import add_noise
from dflash_ray.draft.optimizers import STATE_PARTS, Optimizer
from dflash_ray.draft.replay import replay
from dflash_ray.draft.schedule import noise_std, rate_factor

Teacher = tuple[np.ndarray, Tensor]  # positions int [P] in the batch, ascending, and final-normed hidden rows [P, H] there


class Diverged(RuntimeError):
    """Too many non-finite steps in a row."""


class DraftTrainer:
    """`embed` and `head` [V, H] are the target's frozen tables (one tensor where tied); `total_steps` fixes the schedule.

    `tables` is their fingerprint, which goes into the state in their place. `fused` None lets the device decide how passes run; the numbers
    are those of the other way up to rounding.
    """

    def __init__(
        self,
        config: Config,
        shape: DraftShape,
        embed: Tensor,
        head: Tensor,
        device: torch.device | str,
        total_steps: int,
        *,
        tables: str = "",
        fused: bool | None = None,
    ) -> None:
        self.config, self.shape, self.total_steps, self.tables = config, shape, total_steps, tables
        self.device = torch.device(device)
        self.dtype = compute_dtype(config.train.precision, self.device)
        self.gamma = decay_gamma(config.loss, shape.block_size)
        self.embed = embed.detach().to(self.device, self.dtype)
        self.head = self.embed if head is embed else head.detach().to(self.device, self.dtype)
        self._zero_tokens = (self.embed == 0).all(1).nonzero()[:, 0].cpu().numpy()
        self.model = DraftModel(shape)
        if config.draft.init == "random":
            initialise(self.model, config.run.seed)
        else:
            self.model.load_state_dict(warm_start(Path(config.draft.init), shape))
        self.model.to(self.device)
        self.averaged: DraftModel | None = None
        if config.train.ema is not None:
            self.averaged = DraftModel(shape).to(self.device).requires_grad_(False)
            self.averaged.load_state_dict(self.model.state_dict())
        fused = fused_covers(shape, self.dtype, self.device) if fused is None else fused
        self.fused = FusedPass(self.model, self.dtype) if fused else None
        self.optimizer = Optimizer(self.model.named_parameters(), config.optimizer, self.fused.copies if self.fused else None)
        self._staging = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.step = 0  # the optimizer step that is being accumulated
        self.updates = 0  # steps that changed weights
        self.skipped = {"no_label": 0, "non_finite": 0}
        self._non_finite_in_a_row = 0
        self._clear()

    def _clear(self) -> None:
        self._gradients: dict[str, list[Tensor | None]] = {}
        self._fused_sums: dict[str, GradientSums] = {}
        self._divisors = {"weight": 0.0, "anchors": 0.0}

    def stage(self, batch: Batch, features: Tensor, teacher: Teacher | None = None) -> Staged:
        """Brings a batch to the device and checks it there; may run in another thread than training. `features` and `teacher` must be
        complete. FeatureError if they are not what the batch asks for. Waits for this batch's work on the device and for nothing else."""
        if self._staging is None:
            return self._stage(batch, features, teacher)
        with torch.cuda.stream(self._staging):
            staged = self._stage(batch, features, teacher)
        self._staging.synchronize()
        return staged

    def _stage(self, batch: Batch, features: Tensor, teacher: Teacher | None) -> Staged:
        features = features.to(self.device, non_blocking=True)
        check_features(batch, features, self.shape, self._zero_tokens)
        labels = Labels.of(batch, self.shape.block_size, self.gamma, self.device)
        blocks = Blocks.of(batch, self.shape.block_size, self.device)
        return Staged(batch, features, labels, blocks, self._teacher_rows(teacher, labels) if labels.count else None)

    def micro_step(self, batch: Batch, features: Tensor, teacher: Teacher | None = None) -> dict[str, float]:
        """Adds the gradients of one batch; features [T, L*H]. Returns sums that add up over batches, for `step_metrics`."""
        return self.train_staged(self._stage(batch, features, teacher))

    def train_staged(self, staged: Staged) -> dict[str, float]:
        """`micro_step` on a batch that is on the device already."""
        labels = staged.labels
        if not labels.count:
            return empty_sums(labels)
        staged.use()
        std = noise_std(self.config.noise, self.step, self.total_steps)
        features = add_noise(staged.features, staged.batch, std, self.config.run.seed, len(self.shape.target_layer_ids)).to(self.dtype)
        if self.fused is None:
            rows, kept = self.model(features, staged.blocks, self.embed, labels.slots), None
        else:
            rows, kept = self.fused.forward(features, staged.blocks, self.embed, labels.slots)
        losses = block_losses(rows.detach(), self.head, labels, self.config.loss, self.config.train.head_chunk, staged.teacher)
        for divisor in self._divisors:
            self._divisors[divisor] += labels.counts[divisor]
        kinds = list(losses.gradients)
        for kind in kinds:
            last, gradient = kind == kinds[-1], losses.gradients.pop(kind)
            if kept is None:
                self._backward(rows, kind, gradient, last)
            else:
                if kind not in self._fused_sums:
                    self._fused_sums[kind] = self.fused.gradient_sums()
                    self._gradients[kind] = self._fused_sums[kind].tensors
                self.fused.backward(kept, gradient, self._fused_sums[kind], again=not last)
        return losses.sums

    def _backward(self, rows: Tensor, kind: str, gradient: Tensor, last: bool) -> None:
        """Autograd from the output rows into the sums of one kind."""
        parameters = list(self.model.parameters())
        for parameter, so_far in zip(parameters, self._gradients.get(kind, [None] * len(parameters)), strict=True):
            parameter.grad = so_far
        rows.backward(gradient, retain_graph=not last)
        self._gradients[kind] = [parameter.grad for parameter in parameters]

    def optimizer_step(self, step: int) -> dict[str, Any]:
        """Ends step number `step` (0, 1, ...): `lr`, `noise_std`, `grad_norm` before clipping, `skipped` None, no_label or non_finite."""
        assert step == self.step, f"optimizer step {step} after {self.step - 1}"
        factor = rate_factor(self.config.schedule, step, self.total_steps)
        report: dict[str, Any] = {
            "lr": self.config.optimizer.lr * factor,
            "noise_std": noise_std(self.config.noise, step, self.total_steps),
            "grad_norm": 0.0,
            "skipped": None,
        }
        if self._divisors["anchors"] == 0:
            report["skipped"] = "no_label"
        else:
            report["grad_norm"] = norm = self._update(factor)
            if math.isfinite(norm):
                self._average()
                self.updates += 1
            else:
                report["skipped"] = "non_finite"
        self._count(report["skipped"])
        self.forget_gradients()
        self.step += 1
        return report

    def _update(self, factor: float) -> float:
        """Divides, clips and moves the weights unless the norm, which it returns, is not finite."""
        (first, gradients), *others = self._gradients.items()
        scale = 1 / self._divisors[first]
        for kind, more in others:
            torch._foreach_mul_(gradients, scale)
            torch._foreach_add_(gradients, more, alpha=1 / self._divisors[kind])
            scale = 1.0
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.optimizer.one_pass:
            norm = norm * scale
            on_its_way = AsyncScalars(norm)
            self.optimizer.step_in_one_pass(gradients, scale, norm, factor, self.updates + 1)
            return on_its_way.wait()
        norm = float(norm) * scale
        if math.isfinite(norm):
            torch._foreach_mul_(gradients, scale * min(1.0, self.config.optimizer.clip / (norm + 1e-12)))
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            self.optimizer.step(factor)
        return norm

    def forget_gradients(self) -> None:
        """As if no micro-step had been made since the last step."""
        self.model.zero_grad(set_to_none=True)
        self._clear()

    def _average(self) -> None:
        """Early on the average forgets faster, so that a short run's average does not remember its random start."""
        if self.averaged is not None:
            decay = min(self.config.train.ema, (1 + self.updates) / (10 + self.updates))
            torch._foreach_lerp_(list(self.averaged.parameters()), [p.detach() for p in self.model.parameters()], 1 - decay)

    def _count(self, skipped: str | None) -> None:
        if skipped is not None:
            self.skipped[skipped] += 1
        self._non_finite_in_a_row = self._non_finite_in_a_row + 1 if skipped == "non_finite" else 0
        if self._non_finite_in_a_row > self.config.train.max_skipped_steps:
            raise Diverged(
                f"the gradient was not finite in {self._non_finite_in_a_row} steps in a row, up to step {self.step}; "
                "lower optimizer.lr, or look at the features of these batches"
            )

    def evaluate(self, batch: Batch, features: Tensor, teacher: Teacher | None = None) -> dict[str, float]:
        """Sums of a batch without noise and without gradients, from the averaged weights where `train.ema` is set."""
        return self.evaluate_staged(self._stage(batch, features, teacher))

    @torch.no_grad()
    def evaluate_staged(self, staged: Staged) -> dict[str, float]:
        """`evaluate` on a batch that is on the device already."""
        labels = staged.labels
        if not labels.count:
            return empty_sums(labels)
        staged.use()
        rows = self.serving_model(staged.features.to(self.dtype), staged.blocks, self.embed, labels.slots)
        losses = block_losses(rows, self.head, labels, self.config.loss, self.config.train.head_chunk, staged.teacher, gradients=False)
        return losses.sums | replay(staged.batch, losses.matches.cpu().numpy())

    @property
    def serving_model(self) -> DraftModel:
        """The weights that validation, best checkpoint and export use."""
        return self.averaged if self.averaged is not None else self.model

    def step_metrics(self, sums: dict[str, float]) -> dict[str, Any]:
        """Means of added-up sums; see `loss.step_metrics`."""
        return step_metrics(sums, self.config.loss, self.shape.block_size)

    def _teacher_rows(self, teacher: Teacher | None, labels: Labels) -> Tensor | None:
        """[R, H] the target's final hidden rows before each label."""
        if not self.config.loss.needs_teacher:
            return None
        if teacher is None:
            raise FeatureError("loss.kl, loss.tv and loss.dpace_kl need the target's teacher rows, and none came with the features")
        positions, rows = teacher
        index = np.minimum(np.searchsorted(positions, labels.positions), len(positions) - 1)
        if len(positions) == 0 or (np.asarray(positions)[index] != labels.positions).any():
            raise FeatureError("a teacher row is missing for a label; the target was asked for other positions than the anchors need")
        if rows.shape != (len(positions), self.shape.hidden):
            raise FeatureError(f"teacher rows are {list(rows.shape)}, expected {[len(positions), self.shape.hidden]}")
        return rows.to(self.device, self.dtype)[torch.from_numpy(index).to(self.device)]

    # ---- state

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Float32 tensors by name (live ones: copy or write them before the next step) and JSON-able values. Only between steps."""
        assert not self._gradients, "state exists at step boundaries only"
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        tensors |= {f"optimizer.{name}": tensor for name, tensor in self.optimizer.state().items()}
        if self.averaged is not None:
            tensors |= {f"averaged.{name}": tensor for name, tensor in self.averaged.state_dict().items()}
        meta = {
            "shape": self.shape.as_dict(),
            "optimizer": self.config.optimizer.name,
            "total_steps": self.total_steps,
            "tables": self.tables,
            "step": self.step,
            "updates": self.updates,
            "skipped": dict(self.skipped),
            "non_finite_in_a_row": self._non_finite_in_a_row,
        }
        return tensors, meta

    def load_state_dict(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """Goes on where `state_dict` was taken. ValueError if shape, optimizer, schedule length, tables or averaging differ."""
        check_same_training(meta, self.shape, self.config.optimizer.name, self.total_steps)
        if meta.get("tables") != self.tables:
            raise ValueError(
                f"the checkpoint was made with an embedding and a head of fingerprint {str(meta.get('tables'))[:12]}, those of target.path "
                f"have {self.tables[:12]}; resume with the same target"
            )
        self._check_state(tensors, meta)
        parts: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "averaged": {}}
        for name, tensor in tensors.items():
            kind, rest = name.split(".", 1)
            parts[kind][rest] = tensor
        self.model.load_state_dict(parts["model"])
        if self.averaged is not None:
            self.averaged.load_state_dict(parts["averaged"])
        self.optimizer.load(parts["optimizer"])
        if self.fused is not None:
            self.fused.refresh()
        self.step, self.updates = meta["step"], meta["updates"]
        self.skipped, self._non_finite_in_a_row = dict(meta["skipped"]), meta["non_finite_in_a_row"]
        self.forget_gradients()

    def _check_state(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """ValueError unless a `state_dict` of this run could have given these."""
        counts = [meta.get("step"), meta.get("updates"), meta.get("non_finite_in_a_row")]
        skipped = meta.get("skipped")
        counts += list(skipped.values()) if isinstance(skipped, dict) and skipped.keys() == self.skipped.keys() else [None]
        if not all(type(count) is int and 0 <= count < 2**63 for count in counts):
            raise ValueError("the checkpoint's counts of steps are damaged")
        averaged = {name for name in tensors if name.startswith("averaged.")}
        if bool(averaged) != (self.averaged is not None):
            raise ValueError("the checkpoint and this run differ in train.ema; resume with the same setting")
        shapes = {name: parameter.shape for name, parameter in self.model.named_parameters()}
        needed = {f"{kind}.{name}" for kind in ("model", "averaged")[: 1 + bool(averaged)] for name in shapes}
        for name in sorted(needed | tensors.keys()):
            kind, _, rest = name.partition(".")
            part, rest = rest.split(".", 1) if kind == "optimizer" and "." in rest else ("", rest)
            scalar = kind == "optimizer" and part == "step"
            if name not in tensors:
                raise ValueError(f"the checkpoint has no tensor {name}")
            if rest not in shapes or kind not in ("model", "averaged", "optimizer") or (part not in STATE_PARTS) == (kind == "optimizer"):
                raise ValueError(f"the checkpoint's tensor {name[:80]} is unknown")
            if tensors[name].dtype != torch.float32 or tensors[name].shape != (torch.Size() if scalar else shapes[rest]):
                raise ValueError(f"the checkpoint's tensor {name} is {tensors[name].dtype} {list(tensors[name].shape)}, not this run's")
        kinds: dict[str, set[str]] = {}
        for name in tensors:
            if name.startswith("optimizer."):
                _, part, rest = name.split(".", 2)
                kinds.setdefault(rest, set()).add(part)
        possible = [{"exp_avg", "exp_avg_sq", "step"}] + [{"momentum"}] * (self.config.optimizer.name == "muon")
        if not all(parts in possible for parts in kinds.values()):
            raise ValueError("the checkpoint's optimizer state is not whole, or of another optimizer")


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """`train.precision`: auto is bf16 on a GPU and float32 elsewhere."""
    if precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bf16": torch.bfloat16}[precision]


def serving_weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of `state_dict` that validation and export use, by parameter name: averaged ones where there are any."""
    prefix = "averaged." if any(name.startswith("averaged.") for name in state) else "model."
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def check_same_training(meta: dict[str, Any], shape: DraftShape, optimizer: str, total_steps: int) -> None:
    """ValueError unless the `meta` of a `state_dict` is of such a trainer."""
    for what, mine, key in (
        ("shape", shape.as_dict(), "the draft section"),
        ("optimizer", optimizer, "optimizer.name"),
        ("total_steps", total_steps, "data, batching or train.epochs"),
    ):
        if meta.get(what) != mine:
            raise ValueError(f"the checkpoint's {what} is {meta.get(what)}, this run's is {mine}; resume with the same {key}")


def warm_start(folder: Path, shape: DraftShape) -> dict[str, Tensor]:
    """Float32 weights of an exported drafter, ours or a published one. Block size and windows may differ from it, nothing else."""
    return {name: tensor.float() for name, tensor in read_tensors(folder, check_warm_start(folder, shape)).items()}
