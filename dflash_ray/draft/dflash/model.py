"""The DFlash drafter: proposes a block of tokens in one pass, reading features of the frozen target.

Two ways through the same weights give the same numbers:

- training, `forward`: all blocks of a batch of packed documents at once;
- serving, `context`, `context_kv`, `forward_block`: one block per sequence against a cache that grows with every accepted token.

    cache = [(k0, v0), ...]                                   # per layer, keys and values of the features seen so far
    new = model.context_kv(model.context(features), positions)  # features of the tokens just verified, their positions
    ...append `new` to the cache along the token dimension...
    hidden = model.forward_block(block_embeddings, positions, cache)   # [K, H]; slot k proposes the token at positions[k]
    proposals = (hidden[1:] @ head.T).argmax(-1)

The compute dtype is that of the incoming features and embeddings; weights are cast to it at use, so float32 masters train with bf16
matmuls. Norms, rotations and softmax are float32 or wider. The frozen embedding and head belong to the target and are passed in.
Source of the architecture: dflash.md, forward pass. Parameter names are those of an export (`export`).
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_ray.draft.blocks.mask import Blocks, sees_context, sees_slot
from dflash_ray.draft.dflash.attention import attention_for
from dflash_ray.draft.dflash.shape import DraftShape
from dflash_ray.linear import linear
from dflash_ray.random_streams import torch_generator

KeyValue = tuple[Tensor, Tensor]
Rotation = tuple[Tensor, Tensor]


class Matrix(nn.Module):
    """x [..., in] -> [..., out] without bias, computed in the dtype of x."""

    def __init__(self, out_size: int, in_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_size, in_size))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.to(x.dtype))


class Norm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in float32 or wider, returned in the dtype of x."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return F.rms_norm(wide, self.weight.shape, self.weight.to(wide.dtype), self.eps).to(x.dtype)


class Attention(nn.Module):
    """Projections of one layer; who sees whom is decided by the caller."""

    def __init__(self, shape: DraftShape):
        super().__init__()
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.head_dim = shape.head_dim
        self.q_proj, self.o_proj = Matrix(queries, shape.hidden), Matrix(shape.hidden, queries)
        self.k_proj, self.v_proj = Matrix(keys, shape.hidden), Matrix(keys, shape.hidden)
        self.q_norm, self.k_norm = Norm(shape.head_dim, shape.rms_norm_eps), Norm(shape.head_dim, shape.rms_norm_eps)

    def queries(self, x: Tensor, rotation: Rotation) -> Tensor:
        """x [..., n, H] -> [..., n, N, D], normalised and rotated."""
        return rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), rotation)

    def keys_values(self, x: Tensor, rotation: Rotation) -> KeyValue:
        """x [..., n, H] -> two [..., n, M, D], keys normalised and rotated."""
        keys = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))
        return rotate(keys, rotation), self.v_proj(x).unflatten(-1, (-1, self.head_dim))


class Mlp(nn.Module):
    def __init__(self, shape: DraftShape):
        super().__init__()
        self.gate_proj, self.up_proj = Matrix(shape.intermediate, shape.hidden), Matrix(shape.intermediate, shape.hidden)
        self.down_proj = Matrix(shape.hidden, shape.intermediate)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: DraftShape):
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = Norm(shape.hidden, shape.rms_norm_eps)
        self.post_attention_layernorm = Norm(shape.hidden, shape.rms_norm_eps)

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Stream x [..., H] and attention's output [..., N, D] -> the stream after this layer [..., H]."""
        x = x + self.self_attn.o_proj(mixed.flatten(-2))
        return x + self.mlp(self.post_attention_layernorm(x))


class DraftModel(nn.Module):
    """Weights are uninitialised except for norms (1): `initialise`, `load_state_dict` or a checkpoint fills them."""

    def __init__(self, shape: DraftShape):
        super().__init__()
        self.shape = shape
        self.fc = Matrix(shape.hidden, shape.features)
        self.hidden_norm = Norm(shape.hidden, shape.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = Norm(shape.hidden, shape.rms_norm_eps)

    def context(self, features: Tensor) -> Tensor:
        """features [..., n, L*H] -> context [..., n, H], shared by all layers."""
        return self.hidden_norm(self.fc(features))

    def rotation(self, positions: Tensor) -> Rotation:
        """int64 positions [...] -> cos, sin [..., 1, D/2], float32 (float64 for a float64 model), one for all heads."""
        wide = torch.promote_types(self.norm.weight.dtype, torch.float32)
        exponent = torch.arange(0, self.shape.head_dim, 2, device=positions.device, dtype=wide) / self.shape.head_dim
        angle = positions.to(wide)[..., None, None] * self.shape.rope_theta**-exponent
        return angle.cos(), angle.sin()

    # ---- training

    def forward(self, features: Tensor, blocks: Blocks, embed: Tensor, slots: Tensor | None = None) -> Tensor:
        """All blocks of a packed batch: features [T, L*H], embed [V, H] -> hidden [A, K, H] after the final norm.

        With `slots` (int64 [R], indices into A*K, for instance those that have a label) only these come back, [R, H], and the last layer
        computes nothing after attention for the others.
        """
        shape, attention = self.shape, attention_for(features.device)
        context = self.context(features)
        x = self.block_embeddings(blocks.anchor_tokens, embed).to(context.dtype)  # [A, K, H]
        at_context, at_slots = self.rotation(blocks.context_positions), self.rotation(blocks.slot_positions)
        for index, layer in enumerate(self.layers):
            attend, normed = layer.self_attn, layer.input_layernorm(x)
            own, seen = attend.keys_values(normed, at_slots), attend.keys_values(context, at_context)
            mixed = attention(attend.queries(normed, at_slots), *own, *seen, blocks, shape.window(index))
            if slots is not None and index == shape.num_layers - 1:
                x, mixed = x.flatten(0, 1)[slots], mixed.flatten(0, 1)[slots]
            x = layer.finish(x, mixed)
        return self.norm(x)

    def block_embeddings(self, anchor_tokens: Tensor, embed: Tensor) -> Tensor:
        """int64 [...], embed [V, H] -> [..., K, H]: the anchor's token in slot 0, the mask token in all others."""
        ids = anchor_tokens[..., None].repeat(*[1] * anchor_tokens.dim(), self.shape.block_size)
        ids[..., 1:] = self.shape.mask_token_id
        return F.embedding(ids, embed)

    # ---- serving

    def context_kv(self, context: Tensor, positions: Tensor) -> list[KeyValue]:
        """context [..., n, H] of tokens at positions int64 [..., n] -> per layer keys and values, each [..., M, n, D], ready to append."""
        rotation = self.rotation(positions)
        return [
            tuple(part.transpose(-3, -2) for part in layer.self_attn.keys_values(context, rotation))  # type: ignore[misc]
            for layer in self.layers
        ]

    def forward_block(
        self, block_embeddings: Tensor, positions: Tensor, cache: list[KeyValue], cache_positions: Tensor | None = None
    ) -> Tensor:
        """One block per sequence: embeddings [..., K, H], positions int64 [..., K] -> hidden [..., K, H] after the final norm.

        positions[..., 0] is the anchor. `cache` holds per layer keys and values [..., M, n, D]; `cache_positions` int64 [..., n] are the
        positions of its entries, 0..n-1 by default. Entries at or after the anchor are not seen, so a cache may be longer than what is
        valid: static buffers, sequences of different length in one batch, rejected tokens not yet overwritten. Any K >= 1 works.
        """
        shape = self.shape
        rotation = self.rotation(positions)
        if cache_positions is None:
            cache_positions = torch.arange(cache[0][0].shape[-2], device=positions.device)
        visible = {window: _visible(positions, cache_positions, window) for window in {shape.window(i) for i in range(shape.num_layers)}}
        x = block_embeddings
        for index, layer in enumerate(self.layers):
            attend, normed = layer.self_attn, layer.input_layernorm(x)
            queries = attend.queries(normed, rotation).transpose(-3, -2)
            own = attend.keys_values(normed, rotation)
            keys, values = (torch.cat([old, new.transpose(-3, -2)], -2) for old, new in zip(cache[index], own, strict=True))
            mixed = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=visible[shape.window(index)], enable_gqa=shape.heads != shape.kv_heads
            )
            x = layer.finish(x, mixed.transpose(-3, -2))
        return self.norm(x)


def _visible(positions: Tensor, cache_positions: Tensor, window: int | None) -> Tensor:
    """positions [..., K], cache_positions [..., n] -> bool [..., 1, K, n + K] for scaled_dot_product_attention."""
    context = sees_context(positions[..., :1, None], positions[..., :, None], cache_positions[..., None, :], window)
    slots = sees_slot(positions[..., :, None], positions[..., None, :], window)
    context = context.expand(*slots.shape[:-1], context.shape[-1])
    return torch.cat([context, slots], -1).unsqueeze(-3)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """x [..., heads, D]: pairs (i, i + D/2) turned by the angles of their position; computed in the rotation's dtype."""
    cos, sin = rotation
    first, second = x.to(cos.dtype).chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def initialise(model: DraftModel, seed: int, std: float = 0.02) -> None:
    """Normal(0, std) matrices and unit norms from `seed` alone: the same on every device and in every order of construction."""

    inference = torch.is_inference_mode_enabled()  # a mode is its thread's own

    def fill(number: int, parameter: nn.Parameter) -> None:
        with torch.inference_mode(inference), torch.no_grad():
            if parameter.dim() == 2:
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=torch_generator("init", seed, number)))
            else:
                parameter.fill_(1.0)

    # a generator draws in one thread, 75 M numbers/s; each parameter has its own
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in [pool.submit(fill, number, parameter) for number, parameter in enumerate(model.parameters())]:
            done.result()
