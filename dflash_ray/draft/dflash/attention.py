"""Attention of block slots over `[context before the anchor ; own slots]`, forward only where something is visible.

`attention_for(device)` is the one place that chooses an implementation. `plain_attention` is the reference twin of every faster one: torch
operations only, one document at a time, so that no `[slots, all context]` matrix ever exists. At 3,000 tokens in 20 documents a document's
scores are 20 times smaller than a dense mask over the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dflash_ray.draft.blocks.mask import AnchorSlice, Blocks, sees_context, sees_slot
from dflash_ray.draft.kernels.limits import sizes_fit

# (q [A,K,N,D], k_slots [A,K,M,D], v_slots [A,K,M,D], k_context [T,M,D], v_context [T,M,D], blocks, window) -> [A,K,N,D]
# N query heads, M key-value heads, N a multiple of M; q and k are normalised and rotated; window None means full attention.
Attention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Blocks, int | None], Tensor]


def attention_for(device: torch.device | str) -> Attention:
    """The attention function for a device."""
    return kernel_attention if torch.device(device).type == "cuda" else plain_attention


def kernel_attention(
    q: Tensor, k_slots: Tensor, v_slots: Tensor, k_context: Tensor, v_context: Tensor, blocks: Blocks, window: int | None
) -> Tensor:
    """See `Attention`. The Triton kernels on a GPU; what they do not take goes through plain torch."""
    rows = q.shape[1] * q.shape[2] // k_slots.shape[2]
    if q.dtype != torch.bfloat16 or not sizes_fit(q.shape[-1], rows):
        return plain_attention(q, k_slots, v_slots, k_context, v_context, blocks, window)
    from dflash_ray.draft.kernels.attention import BlockAttention

    return BlockAttention.apply(q, k_slots, v_slots, k_context, v_context, blocks, window)


def plain_attention(
    q: Tensor, k_slots: Tensor, v_slots: Tensor, k_context: Tensor, v_context: Tensor, blocks: Blocks, window: int | None
) -> Tensor:
    """See `Attention`. Softmax in float32 or wider."""
    anchors, slots, heads, width = q.shape
    kv_heads = k_slots.shape[2]
    group = heads // kv_heads
    wide = torch.promote_types(q.dtype, torch.float32)
    # heads that share keys become rows of one matmul: [M, A, G*K, D]
    q = (q * width**-0.5).view(anchors, slots, kv_heads, group, width)
    q = q.permute(2, 0, 3, 1, 4).reshape(kv_heads, anchors, group * slots, width)
    inside = q @ k_slots.permute(2, 0, 3, 1)  # [M, A, G*K, K]
    if window is not None:
        slot = torch.arange(slots, device=q.device)
        hidden = ~sees_slot(slot[:, None], slot[None, :], window).repeat(group, 1)
        inside = inside.masked_fill(hidden, float("-inf"))
    sizes = [part.last - part.first for part in blocks.slices]
    pieces = zip(blocks.slices, q.split(sizes, 1), inside.split(sizes, 1), v_slots.permute(2, 0, 1, 3).split(sizes, 1), strict=True)
    keys, values = k_context.permute(1, 2, 0).split(blocks.documents, 2), v_context.transpose(0, 1).split(blocks.documents, 1)
    rows = torch.arange(group * slots, device=q.device) % slots  # slot of each row
    outputs = []
    for part, query, own, own_values in pieces:
        # no anchor of the part sees context before `low` or from `high` on
        low, high = 0 if window is None else max(0, part.first_position - window + 1), part.last_position
        hidden = ~_visible(part, blocks, rows, low, high, window)
        before = query.reshape(kv_heads, -1, width) @ keys[part.document][:, :, low:high]
        before = before.view(kv_heads, -1, group * slots, high - low) if high > low else own[..., :0]
        scores = torch.cat([before.masked_fill(hidden, float("-inf")), own], -1)
        weights = torch.softmax(scores, -1, dtype=wide).to(q.dtype)
        context = weights[..., : high - low].reshape(kv_heads, len(hidden) * group * slots, high - low) @ values[part.document][:, low:high]
        outputs.append(context.view_as(query) + weights[..., high - low :] @ own_values)
    mixed = torch.cat(outputs, 1)  # [M, A, G*K, D]
    return mixed.view(kv_heads, anchors, group, slots, width).permute(1, 3, 0, 2, 4).reshape(anchors, slots, heads, width)


def _visible(part: AnchorSlice, blocks: Blocks, rows: Tensor, low: int, high: int, window: int | None) -> Tensor:
    """bool [a, 1 or G*K, high - low]: which context tokens each row of the part's anchors sees."""
    positions = blocks.slot_positions[part.first : part.last]
    anchor = positions[:, :1, None]
    slot = anchor if window is None else positions[:, rows, None]
    return sees_context(anchor, slot, torch.arange(low, high, device=rows.device), window)
