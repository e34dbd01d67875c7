"""From a Hugging Face folder to a `FrozenTarget`.

The family's own classes are built without storage, filled from the files tensor by tensor, and taken apart into `layers`. Layers past the
last tap, the final norm and the head are read only where someone asked for them. Weights are float32 on a CPU and bf16 on a GPU unless
told otherwise; float16 is refused, its range is too small for hidden states of large targets. On a GPU every layer passes the self-test of
the fast path as it is loaded; where one does not, documents run apart through plain torch and the log says why.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dflash_ray.target.devices import fused_for, mixers_for
from dflash_ray.target.fast import FastLayer
from dflash_ray.target.layers import Attention, GatedDeltaNet, Layer, Mlp, Moe, RmsNorm, RotaryTable
from dflash_ray.target.model import FrozenTarget
from dflash_ray.target.parameters import refuse_unsupported
from dflash_ray.target.plain.mixers import plain_mixers
from dflash_ray.target.self_test import FastPathRefused, KernelReport, SelfTest, fast_path_missing
from dflash_ray.target.shape import TargetShape, known_target_shape, read_target_shape
from dflash_ray.target.weights import WeightFiles

_PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
_WARM_TOKENS = 16384  # of the full-size pass that a GPU's kernels are tuned by
log = logging.getLogger(__name__)


def load_target(
    path: Path | str | None,
    *,
    taps: list[int] | None,
    device: torch.device | str,
    precision: str = "auto",
    layout: str = "auto",
    teacher: bool = False,
    with_head: bool = False,
    random_shape: str | None = None,
    seed: int = 0,
    fast: bool | None = None,
    require_fast: bool = False,
) -> FrozenTarget:
    """A frozen target on `device`.

    taps: layers whose output is read; only layers up to the last are kept. None keeps all.
    teacher: keep all layers and the final norm (for teacher rows). with_head: these and the head (for decoding).
    layout: packed, padded, or auto (each batch says).
    random_shape: a name of `known_shapes.SHAPES`; random weights from `seed` instead of a folder.
    fast: one packed pass through fused kernels if the self-test allows it; default on a GPU, except for decoding. require_fast: ValueError
    where it does not. precision fp8 (matmuls in e4m3) exists only there.
    """
    device = torch.device(device)
    target_shape = known_target_shape(random_shape) if random_shape else read_target_shape(path)
    dtype = _dtype(precision, device)
    whole = teacher or with_head or taps is None
    kept = target_shape.num_layers if whole else max(taps) + 1
    if fast is None:
        fast = device.type == "cuda" and not with_head
    if precision == "fp8" and not fast:
        raise ValueError("target.precision: fp8 computes features on a GPU and nothing else; use bf16 to decode, bf16 or float32 on a CPU")
    model = _skeleton(target_shape, kept)
    files = None if random_shape else WeightFiles(path)
    generator = torch.Generator(device).manual_seed(seed)

    def fill(module: nn.Module, name: str) -> nn.Module:
        if files is None:
            _randomise(module, device, dtype, generator)
        else:
            _fill(module, name, files, device, dtype)
        return module.requires_grad_(False).eval()

    layers = []
    with torch.no_grad():
        embedding = fill(model.embed_tokens, "embed_tokens.").weight
        table = RotaryTable(type(model.rotary_emb)(model.config), target_shape.head_dim, device)
        builder = _FastBuilder(target_shape, embedding, table, taps or [], fp8=precision == "fp8") if fast else None
        for index in range(kept):
            layer = _layer(fill(model.layers[index], f"layers.{index}."), target_shape, index)
            if builder is not None:
                builder.add(index, layer)
            if precision != "fp8":
                layers.append(layer)
            model.layers[index] = nn.Identity()  # what was joined into `layers` need not exist twice
        norm = fill(model.norm, "norm.") if whole else None
        head = None
        if with_head:
            if files is None:
                head = embedding
            else:
                head = files.head(device, tied=target_shape.tie_word_embeddings).to(dtype)
                head = embedding if target_shape.tie_word_embeddings or files.head_name is None else head
            for layer in layers:
                layer.expect_few_rows()
    report = builder.report if builder is not None else KernelReport()
    if require_fast and report.reason:
        raise ValueError(f"target.require_fast_path: {report.reason}; fix it or set require_fast_path to false (slower)")
    return FrozenTarget(
        target_shape=target_shape,
        taps=list(taps) if taps is not None else [],
        layers=layers,
        embedding=embedding,
        final_norm=norm,
        head=head,
        rotary_table=table,
        layout=layout,
        mixers=plain_mixers() if report.reason else mixers_for(device),
        fast=builder.layers if builder is not None and not report.reason else None,
        kernels=report,
    )


class _FastBuilder:
    """Fast layers, made and tested one by one while the weights arrive; after the first refusal nothing but its reason."""

    def __init__(self, target_shape: TargetShape, embedding: torch.Tensor, table: RotaryTable, taps: list[int], *, fp8: bool) -> None:
        delta, device = target_shape.has_linear_attention, embedding.device
        self.taps, self.fp8 = taps, fp8
        self.layers: list[FastLayer] = []
        self.report = KernelReport(reason=fast_path_missing(device, embedding.dtype, delta=delta))
        if self.report.reason:
            self._refuse(self.report.reason)
            return
        self.fused = fused_for(device)
        warm = _WARM_TOKENS if device.type == "cuda" else 0
        self.test = SelfTest(embedding, table, delta=delta, warm_tokens=min(warm, 8 * target_shape.max_position_embeddings))
        self.report = self.test.report

    def add(self, index: int, layer: Layer) -> None:
        if self.report.reason:
            return
        fast = FastLayer(layer, self.fused)
        try:
            self.test.check(index, layer, fast)
            if self.fp8:
                fast = FastLayer(layer, self.fused, fp8=True)
                self.test.check_fp8(index, fast, self.taps)
        except FastPathRefused as error:
            return self._refuse(str(error))
        except Exception as error:  # compilers, drivers and kernel libraries fail in ways of their own; all mean the same here
            return self._refuse(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}")
        self.layers.append(fast)

    def _refuse(self, reason: str) -> None:
        if self.fp8:
            raise ValueError(f"target.precision: fp8 needs the fast path, which was refused: {reason}; use bf16")
        self.layers.clear()
        self.report = KernelReport(reason=reason)
        log.warning("fast path refused, documents run apart through plain torch: %s", reason)


def _dtype(precision: str, device: torch.device) -> torch.dtype:
    if precision == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if precision not in _PRECISIONS:
        raise ValueError(f"target.precision: {precision!r} is not supported; use float32, bf16 or fp8 (float16 overflows hidden states)")
    return _PRECISIONS[precision]


def _skeleton(target_shape: TargetShape, kept: int) -> nn.Module:
    """The family's text model with `kept` layers and no storage."""
    with warnings.catch_warnings():
        # flash-linear-attention warns at import on a machine without a GPU; it is not used there
        warnings.filterwarnings("ignore", message="Triton is not supported")
        from transformers import AutoConfig, AutoModel

        values = {key: value for key, value in target_shape.config.items() if key not in ("text_config", "vision_config")}
        values |= {"num_hidden_layers": kept, "layer_types": list(target_shape.layer_types[:kept])}
        config = AutoConfig.for_model(_text_type(target_shape.model_type), **_constructor_values(values))
        refuse_unsupported(config.rope_parameters.get("rope_type", "default"), config.hidden_act)
        with torch.device("meta"):
            return AutoModel.from_config(config)


def _text_type(model_type: str) -> str:
    return f"{model_type}_text" if model_type in ("qwen3_5", "qwen3_5_moe") else model_type


def _constructor_values(values: dict[str, Any]) -> dict[str, Any]:
    foreign = ("model_type", "architectures", "transformers_version", "dtype", "torch_dtype", "quantization_config")
    return {key: value for key, value in values.items() if key not in foreign}


def _layer(module: nn.Module, target_shape: TargetShape, index: int) -> Layer:
    eps = target_shape.rms_norm_eps
    if target_shape.layer_types[index] == "linear_attention":
        mixer = GatedDeltaNet(module.linear_attn)
    else:
        rope = target_shape.config.get("rope_parameters") or {}
        partial = rope.get("partial_rotary_factor", target_shape.config.get("partial_rotary_factor"))
        if partial is None:
            partial = 0.25 if target_shape.has_linear_attention else 1.0
        mixer = Attention(
            module.self_attn,
            heads=target_shape.num_attention_heads,
            kv_heads=target_shape.num_key_value_heads,
            rotary_dim=int(target_shape.head_dim * partial),
            window=target_shape.config.get("sliding_window") if target_shape.layer_types[index] == "sliding_attention" else None,
            eps=eps,
        )
    dense = hasattr(module.mlp, "gate_proj")
    return Layer(
        RmsNorm(module.input_layernorm, eps),
        mixer,
        RmsNorm(module.post_attention_layernorm, eps),
        Mlp(module.mlp) if dense else Moe(module.mlp),
    )


def _fill(module: nn.Module, name: str, files: WeightFiles, device: torch.device, dtype: torch.dtype) -> None:
    """Every parameter of `module` from the files, cast to `dtype`; decay rates stay float32."""
    for key, parameter in list(module.named_parameters()):
        tensor = _expert_stack(name + key, parameter.shape, files, device)
        if tensor is None:
            tensor = files.read(name + key, device)
        if tensor.shape != parameter.shape:
            raise ValueError(f"target.path: {name}{key} is {list(tensor.shape)} in the files, config.json makes it {list(parameter.shape)}")
        _set(module, key, tensor.to(torch.float32 if key.endswith(("A_log", "dt_bias")) else dtype))


def _expert_stack(name: str, shape: torch.Size, files: WeightFiles, device: torch.device) -> torch.Tensor | None:
    """Stacked expert weights [E, ...] from files that hold one matrix per expert; None where `name` is no such thing."""
    if name in files or ".experts." not in name:
        return None
    stem, _, leaf = name.rpartition(".")
    parts = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
    return torch.stack([torch.cat([files.read(f"{stem}.{e}.{part}.weight", device) for part in parts]) for e in range(shape[0])])


def _randomise(module: nn.Module, device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> None:
    """Weights that keep activations finite through many layers: matrices N(0, 0.02), norm weights as the family starts them."""
    for key, parameter in list(module.named_parameters()):
        value = torch.empty(parameter.shape, device=device, dtype=dtype)
        if parameter.ndim >= 2:
            value.normal_(0, 0.02, generator=generator)
        elif key.endswith("A_log"):
            value = value.float().uniform_(0.01, 16, generator=generator).log_()
        elif key.endswith("dt_bias") or key.endswith("linear_attn.norm.weight"):
            value.fill_(1.0)
        else:
            value.zero_() if _zero_centred(module, key) else value.fill_(1.0)
        _set(module, key, value)


def _zero_centred(module: nn.Module, key: str) -> bool:
    owner = module.get_submodule(key.rpartition(".")[0])
    return "3_5" in type(owner).__name__


def _set(module: nn.Module, key: str, value: torch.Tensor) -> None:
    path, _, leaf = key.rpartition(".")
    setattr(module.get_submodule(path), leaf, nn.Parameter(value, requires_grad=False))
