"""The training pass with its gradients written out, so that it keeps little, copies nothing and runs few, large kernels.

Same numbers as `DraftModel.forward` and autograd. What is different:

- matmuls read one copy of the weights in the compute dtype, q/k/v and gate/up joined; the optimizer rewrites it once per step;
- weight gradients go from the matmul straight into float32 sums, the first batch of a step overwriting them;
- kept per slot and layer are the stream before and after attention, q/k/v, attention's output and gate/up: (2H + 2ND + 2MD + 2I) values.
  Norms, rotations and SwiGLU are computed again in the backward pass, fused with their gradients;
- all mask slots enter the first layer with one and the same embedding, so its q/k/v are computed for A + 1 rows instead of A*K;
- the features and the embedding are frozen: no gradient is computed for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_ray.draft.blocks.mask import Blocks
from dflash_ray.draft.dflash.model import DraftModel
from dflash_ray.draft.dflash.ops import HeadViews, Ops, matmul, ops_for
from dflash_ray.draft.dflash.shape import DraftShape


def fused_covers(shape: DraftShape, dtype: torch.dtype, device: torch.device) -> bool:
    """May this pass train the drafter on the device with its kernels?"""
    return device.type == "cuda" and dtype == torch.bfloat16 and shape.fits_kernels


class Joined:
    """Matrices that read the same input, as one: a copy in the compute dtype, rows end to end."""

    def __init__(self, matrices: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        self.matrices = list(matrices)
        self.rows = [len(matrix) for matrix in matrices]
        self.copy = matrices[0].detach().new_empty(sum(self.rows), matrices[0].shape[1], dtype=dtype)

    def parts(self, buffer: Tensor) -> dict[nn.Parameter, Tensor]:
        """Views of a buffer of the joined shape, one per matrix."""
        return dict(zip(self.matrices, buffer.split(self.rows), strict=True))


class GradientSums:
    """Float32 (or wider) sums of gradients over the batches of a step. The first batch overwrites what is there."""

    def __init__(self, joined: Sequence[Joined], parameters: Sequence[nn.Parameter]) -> None:
        self._sums: dict[Any, Tensor] = {group: torch.empty_like(group.copy, dtype=group.matrices[0].dtype) for group in joined}
        views: dict[nn.Parameter, Tensor] = {}
        for group in joined:
            views |= group.parts(self._sums[group])
        vectors = {parameter: torch.empty_like(parameter) for parameter in parameters if parameter not in views}
        self._sums |= vectors
        self._filled: set[Any] = set()
        self.tensors = [(views | vectors)[parameter] for parameter in parameters]  # in the order of `parameters`

    def add_matmul(self, group: Joined, out_grad: Tensor, inputs: Tensor, rows: slice = slice(None)) -> None:
        """out_grad [n, rows] and inputs [n, in] of a matmul with `group` (with some of its rows, after all had a first part)."""
        matmul(out_grad.T, inputs, self._sums[group][rows], add=group in self._filled)
        self._filled.add(group)

    def add(self, vector: nn.Parameter, value: Tensor) -> None:
        if vector in self._filled:
            self._sums[vector].add_(value)
        else:
            self._sums[vector].copy_(value)
            self._filled.add(vector)


@dataclass
class _KeptLayer:
    stream: Tensor | None  # [A*K, H] before the layer; None in the first, where it is an embedding
    qkv: Tensor  # [A*K, (N+2M)*D] before norm and rotation
    context_kv: Tensor  # [T, 2M*D]
    mixed: Tensor  # [A*K, N, D]
    log: Any
    middle: Tensor  # [A*K or R, H] after attention
    both: Tensor | None  # [A*K or R, 2I] gate beside up


@dataclass
class Kept:
    """What the backward pass needs of one batch."""

    features: Tensor
    blocks: Blocks
    slots: Tensor  # int64 [R] the slots whose output is wanted, of A*K
    raw_context: Tensor  # [T, H] before its norm
    context: Tensor
    first: Tensor  # [A+1, H] embeddings of the anchors' tokens and of the mask
    at_slots: tuple[Tensor, Tensor]  # cos, sin [A*K, D/2]
    at_context: tuple[Tensor, Tensor]
    spans: dict[int | None, Any]
    layers: list[_KeptLayer] = field(default_factory=list)
    last: Tensor | None = None  # [R, H] before the final norm


class FusedPass:
    """Forward and backward of `model`, which keeps the master weights. `refresh` after they changed other than through `copies`."""

    def __init__(self, model: DraftModel, dtype: torch.dtype, ops: Ops | None = None) -> None:
        self.model, self.shape, self.dtype = model, model.shape, dtype
        self.ops = ops or ops_for(model.norm.weight.device)
        self.parameters = list(model.parameters())
        self._fc = Joined([model.fc.weight], dtype)
        self._layers = []
        for layer in model.layers:
            attend, mlp = layer.self_attn, layer.mlp
            groups = (attend.q_proj, attend.k_proj, attend.v_proj), (attend.o_proj,), (mlp.gate_proj, mlp.up_proj), (mlp.down_proj,)
            self._layers.append([Joined([matrix.weight for matrix in group], dtype) for group in groups])
        self._joined = [self._fc, *(group for groups in self._layers for group in groups)]
        self.copies: dict[nn.Parameter, Tensor] = {}  # what matmuls read of each matrix
        for group in self._joined:
            self.copies |= group.parts(group.copy)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copies the master weights."""
        torch._foreach_copy_(list(self.copies.values()), list(self.copies))

    def gradient_sums(self) -> GradientSums:
        return GradientSums(self._joined, self.parameters)

    @torch.no_grad()
    def forward(self, features: Tensor, blocks: Blocks, embed: Tensor, slots: Tensor) -> tuple[Tensor, Kept]:
        """features [T, L*H], embed [V, H], slots int64 [R] of A*K -> hidden [R, H] after the final norm, and what `backward` needs."""
        model, ops, shape = self.model, self.ops, self.shape
        eps, heads, keys, size = shape.rms_norm_eps, shape.heads, shape.kv_heads, shape.head_dim
        raw = features @ self._fc.copy.T
        context = ops.norm(raw, model.hidden_norm.weight, eps)[1]
        anchors = len(blocks.anchors)
        ids = F.pad(blocks.anchor_tokens, (0, 1), value=shape.mask_token_id)
        at_slots, at_context = (
            tuple(part.reshape(-1, size // 2) for part in model.rotation(positions))
            for positions in (blocks.slot_positions, blocks.context_positions)
        )
        spans = {window: ops.spans(blocks, window) for window in {shape.window(i) for i in range(shape.num_layers)}}
        kept = Kept(features, blocks, slots, raw, context, F.embedding(ids, embed).to(self.dtype), at_slots, at_context, spans)
        stream = middle = grown = None
        for index, (layer, (qkv_group, o_group, up_group, down_group)) in enumerate(zip(model.layers, self._layers, strict=True)):
            attend, weight = layer.self_attn, layer.input_layernorm.weight
            if index == 0:
                which = torch.full_like(blocks.slot_positions, anchors)
                which[:, 0] = torch.arange(anchors, device=which.device)
                which = which.flatten()
                stream = kept.first[which]
                qkv = (ops.norm(kept.first, weight, eps)[1] @ qkv_group.copy.T)[which]
            else:
                stream, normed = ops.norm(middle, weight, eps, grown)
                qkv = normed @ qkv_group.copy.T
            context_kv = context @ qkv_group.copy[heads * size :].T
            q_weight, k_weight = attend.q_norm.weight, attend.k_norm.weight
            rotated = ops.norm_rope(qkv, q_weight, k_weight, *at_slots, heads, keys, eps)
            rotated_context = ops.norm_rope(context_kv, k_weight, k_weight, *at_context, 0, keys, eps)
            mixed, log = ops.attention(*self._views(rotated, qkv, rotated_context, context_kv), blocks, shape.window(index))
            last = index == shape.num_layers - 1
            entering, flat = (stream[slots], mixed.flatten(1)[slots]) if last else (stream, mixed.flatten(1))
            middle, normed = ops.norm(entering, layer.post_attention_layernorm.weight, eps, flat @ o_group.copy.T)
            both = normed @ up_group.copy.T
            del normed
            grown = ops.swiglu(both) @ down_group.copy.T
            kept.layers.append(_KeptLayer(stream if index else None, qkv, context_kv, mixed, log, middle, both))
        kept.last, hidden = ops.norm(middle, model.norm.weight, eps, grown)
        return hidden, kept

    @torch.no_grad()
    def backward(self, kept: Kept, grad: Tensor, sums: GradientSums, *, again: bool = False) -> None:
        """Adds the gradients for `grad` [R, H] of the output, which is overwritten. `kept` can be used once more only with `again`."""
        model, ops, shape, eps = self.model, self.ops, self.shape, self.shape.rms_norm_eps
        sums.add(model.norm.weight, ops.norm_backward(kept.last, model.norm.weight, eps, grad, None, False)[1])
        context_grad = torch.empty_like(kept.context, dtype=torch.promote_types(self.dtype, torch.float32))
        layers = list(kept.layers)
        if not again:
            kept.layers.clear()
        for index in reversed(range(shape.num_layers)):
            layer, here = model.layers[index], layers.pop()
            qkv_group, o_group, up_group, down_group = self._layers[index]
            both = here.both.clone() if again else here.both
            grown = grad @ down_group.copy
            ops.swiglu_backward(both, grown)
            sums.add_matmul(down_group, grad, grown)
            del grown
            weight = layer.post_attention_layernorm.weight
            after = both @ up_group.copy
            normed, weight_grad = ops.norm_backward(here.middle, weight, eps, after, grad)
            sums.add(weight, weight_grad)
            sums.add_matmul(up_group, both, normed)
            del both, normed
            if not again:
                here.both = None  # half of what a layer keeps
            grad, flat = after, here.mixed.flatten(1)
            last = index == shape.num_layers - 1
            sums.add_matmul(o_group, grad, flat[kept.slots] if last else flat)
            mixed_grad = grad @ o_group.copy
            if last:
                # where each slot's row stands; slots without a label read a row of zeros
                place = torch.full((len(flat),), len(grad), device=flat.device)
                place[kept.slots] = torch.arange(len(grad), device=flat.device)
                grad, mixed_grad = (F.pad(part, (0, 0, 0, 1))[place] for part in (grad, mixed_grad))
            qkv_grad, kv_grad = self._attention_backward(kept, here, index, mixed_grad, sums)
            del mixed_grad
            if index == 0:
                by_slot = qkv_grad.unflatten(0, (-1, shape.block_size))
                masked = by_slot[:, 1:].sum((0, 1), dtype=context_grad.dtype).to(self.dtype)
                qkv_grad, residual, stream = torch.cat([by_slot[:, 0], masked[None]]), None, kept.first
            else:
                residual, stream = grad, here.stream
            weight = layer.input_layernorm.weight
            before = qkv_grad @ qkv_group.copy
            normed, weight_grad = ops.norm_backward(stream, weight, eps, before, residual)
            sums.add(weight, weight_grad)
            sums.add_matmul(qkv_group, qkv_grad, normed)
            context_rows = slice(shape.heads * shape.head_dim, None)
            sums.add_matmul(qkv_group, kv_grad, kept.context, context_rows)
            matmul(kv_grad, qkv_group.copy[context_rows], context_grad, add=not last)
            grad = before
        grad = context_grad.to(self.dtype)
        sums.add(model.hidden_norm.weight, ops.norm_backward(kept.raw_context, model.hidden_norm.weight, eps, grad, None, False)[1])
        sums.add_matmul(self._fc, grad, kept.features)

    def _attention_backward(
        self, kept: Kept, here: _KeptLayer, index: int, mixed_grad: Tensor, sums: GradientSums
    ) -> tuple[Tensor, Tensor]:
        """Gradients of a layer's q/k/v [A*K, (N+2M)*D] and of its context keys and values [T, 2M*D]."""
        ops, shape, attend = self.ops, self.shape, self.model.layers[index].self_attn
        eps, q_weight, k_weight = shape.rms_norm_eps, attend.q_norm.weight, attend.k_norm.weight
        of_slots = (q_weight, k_weight, *kept.at_slots, shape.heads, shape.kv_heads, eps)
        of_context = (k_weight, k_weight, *kept.at_context, 0, shape.kv_heads, eps)
        rotated, rotated_context = ops.norm_rope(here.qkv, *of_slots), ops.norm_rope(here.context_kv, *of_context)
        qkv_grad, kv_grad = torch.empty_like(here.qkv), torch.empty_like(here.context_kv)
        ops.attention_backward(
            *self._views(rotated, here.qkv, rotated_context, here.context_kv), kept.blocks, kept.spans[shape.window(index)],
            here.mixed, here.log, mixed_grad.view_as(here.mixed), self._views(qkv_grad, qkv_grad, kv_grad, kv_grad),
        )  # fmt: skip
        q_weight_grad, k_weight_grad = ops.norm_rope_backward(here.qkv, *of_slots, qkv_grad)
        sums.add(q_weight, q_weight_grad)
        sums.add(k_weight, k_weight_grad + ops.norm_rope_backward(here.context_kv, *of_context, kv_grad)[1])
        return qkv_grad, kv_grad

    def _views(self, rotated: Tensor, qkv: Tensor, rotated_context: Tensor, context_kv: Tensor) -> HeadViews:
        """Heads of [A*K, >= (N+M)*D], [A*K, (N+2M)*D], [T, >= M*D] and [T, 2M*D]."""
        n, m = self.shape.heads, self.shape.kv_heads
        rotated, qkv, rotated_context, context_kv = (
            part.unflatten(1, (-1, self.shape.head_dim)) for part in (rotated, qkv, rotated_context, context_kv)
        )
        return rotated[:, :n], rotated[:, n : n + m], qkv[:, n + m :], rotated_context[:, :m], context_kv[:, m:]
