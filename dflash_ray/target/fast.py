"""One packed pass in the fewest kernels: what a GPU runs for features.

A `FastLayer` shares its weights with the plain `Layer` it is made from and computes the same function on one row of documents end to end;
the plain layer, run document by document, is the oracle it is compared with, in tests and at every start (`self_test`). Per layer there are
four matmuls, the mixing itself and four to six memory-bound kernels; nothing asks the device for a number, so the host runs ahead.
A padded batch is the special case of documents of equal length.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from dflash_ray.target.devices import bounds_for
from dflash_ray.target.layers import Attention, GatedDeltaNet, Layer, Mlp, RmsNorm
from dflash_ray.target.matmul import Fp8Matmul, Matmul, ResidualStream
from dflash_ray.target.plain.fused import Fused, Quantised
from dflash_ray.target.plain.mixers import DocumentBounds


@dataclass(frozen=True)
class Documents:
    """How T tokens fall into documents, on the device, with everything that any layer derives from it."""

    bounds: DocumentBounds
    positions: torch.Tensor  # int32 [T], from each document's start
    cos: torch.Tensor  # float32 [positions, D] and sin, as `FrozenTarget.rotary_table` gives them
    sin: torch.Tensor


def documents(lengths: np.ndarray, device: torch.device, table: tuple[torch.Tensor, torch.Tensor], *, delta: bool) -> Documents:
    """Of documents of `lengths` (int64 [D], none 0), end to end. `delta`: some layer is a gated delta net."""
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    positions = torch.from_numpy((np.arange(bounds[-1]) - np.repeat(bounds[:-1], lengths)).astype(np.int32))
    if device.type == "cuda":
        positions = positions.pin_memory().to(device, non_blocking=True)
    return Documents(bounds_for(bounds, device, delta=delta), positions, *table)


def _without_matrices(mixer: Attention | GatedDeltaNet) -> Attention | GatedDeltaNet:
    """Sizes, norm weights and rates of a mixer; its matrices live on only if someone else holds them."""
    light = copy.copy(mixer)
    light.in_proj = light.out_proj = None
    return light


class FastAttention:
    def __init__(self, mixer: Attention, matmul: type[Matmul | Fp8Matmul]) -> None:
        self.shape = _without_matrices(mixer)
        self.in_proj = matmul(mixer.in_proj.weight, mixer.in_proj.bias)
        self.out_proj = matmul(mixer.out_proj.weight, mixer.out_proj.bias)

    def __call__(self, x: torch.Tensor | Quantised, docs: Documents, fused: Fused) -> torch.Tensor | Quantised:
        """Normed stream -> input of the output matmul [T, N*D]."""
        mixer = self.shape
        joined = self.in_proj(x)
        n, m, dim = mixer.heads, mixer.kv_heads, mixer.head_dim
        fused.norm_rope(joined, n + m, dim, mixer.qk_weight, mixer.eps, docs.cos, docs.sin, docs.positions)
        q, k, v = (part.unflatten(-1, (-1, dim)) for part in joined[:, : (n + 2 * m) * dim].split((n * dim, m * dim, m * dim), -1))
        mixed = fused.attention(q, k, v, scale=mixer.scale, window=mixer.window, bounds=docs.bounds)
        return fused.gate_output(mixed, joined[:, (n + 2 * m) * dim :] if mixer.gated else None, fp8=self.out_proj.fp8)


class FastDeltaNet:
    def __init__(self, mixer: GatedDeltaNet, matmul: type[Matmul | Fp8Matmul]) -> None:
        self.shape = _without_matrices(mixer)
        self.w_conv = mixer.w_conv.t().contiguous()  # [taps, C]: a kernel reads neighbouring channels together
        self.in_proj = matmul(mixer.in_proj.weight, None)
        self.out_proj = matmul(mixer.out_proj.weight, None)

    def __call__(self, x: torch.Tensor | Quantised, docs: Documents, fused: Fused) -> torch.Tensor | Quantised:
        mixer = self.shape
        joined = self.in_proj(x)
        _, z, b, a = joined.split(mixer.sizes, -1)
        q, k, v = fused.conv_heads(joined, self.w_conv, mixer.k_heads, mixer.k_dim, mixer.v_heads, mixer.v_dim, docs.positions)
        g, beta = fused.decays(b, a, mixer.rate, mixer.dt_bias)
        mixed = fused.delta_rule(q, k, v, g, beta, bounds=docs.bounds)
        return fused.gated_norm(mixed, z, mixer.norm_weight, mixer.norm_eps, fp8=self.out_proj.fp8)


class FastLayer:
    """`layer` for one packed pass; `fp8` keeps copies of the weights in e4m3 and nothing of the originals' matrices."""

    def __init__(self, layer: Layer, fused: Fused, *, fp8: bool = False) -> None:
        matmul = Fp8Matmul if fp8 else Matmul
        self.fused = fused
        self.input_norm, self.post_norm = layer.input_norm, layer.post_norm
        kind = FastAttention if isinstance(layer.mixer, Attention) else FastDeltaNet
        self.mixer = kind(layer.mixer, matmul)
        self.dense = isinstance(layer.mlp, Mlp)
        if self.dense:
            mlp = layer.mlp
            self.in_proj, self.out_proj = matmul(mlp.in_proj.weight, mlp.in_proj.bias), matmul(mlp.out_proj.weight, mlp.out_proj.bias)
        else:
            self.experts = layer.mlp

    def normed(self, stream: ResidualStream, norm: RmsNorm, *, fp8: bool) -> torch.Tensor | Quantised:
        return self.fused.rms_norm(stream.x, norm.weight, norm.eps, add=stream.take_pending(), fp8=fp8)

    def __call__(self, stream: ResidualStream, docs: Documents) -> None:
        """Adds the layer's update to the stream [T, H]."""
        mixed = self.mixer(self.normed(stream, self.input_norm, fp8=self.mixer.in_proj.fp8), docs, self.fused)
        self.mixer.out_proj.add_to(stream, mixed)
        if self.dense:
            gate_up = self.in_proj(self.normed(stream, self.post_norm, fp8=self.in_proj.fp8))
            self.out_proj.add_to(stream, self.fused.swiglu(gate_up, fp8=self.out_proj.fp8))
        else:
            stream.pending = self.experts(self.normed(stream, self.post_norm, fp8=False))


def run_layers(
    layers: list[FastLayer], ids: torch.Tensor, embedding: torch.Tensor, docs: Documents, taps: list[int], out: torch.Tensor,
    real: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Embeds ids int32 [T], runs the layers, writes tap i into columns i*H.. of out [tokens, L*H]; the last output [T, H].

    real: int64 [tokens], which of the T each row of `out` is; None for all of them in order.
    """
    stream = ResidualStream(F.embedding(ids, embedding))
    width = embedding.shape[1]
    for index, layer in enumerate(layers):
        layer(stream, docs)
        if index in taps:
            column = taps.index(index) * width
            x = stream.settle()
            out[:, column : column + width] = x if real is None else x[real]
    return stream.settle()
