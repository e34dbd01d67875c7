"""The gated delta rule of one packed pass on CUDA, from chunk inverses to outputs in one kernel.

A program carries the state of one value head of one document, or some columns of it, through the document's chunks: the state never leaves
the registers, and neither pseudo-values nor the states between chunks are ever written. Per chunk of C tokens, with e = exp of the decays
summed from the chunk's start (formula of `plain.mixers.delta_chunk`):

    u = (I + tril(beta e_i/e_j k k^T, -1))^-1 beta (v - e k S)      the inverse is given
    o = (e q S + tril(e_i/e_j q k^T) u) / sqrt(Dk)
    S = e_C S + (e_C/e k)^T u

The inverses of all chunks come from flash-linear-attention, which computes them in parallel beforehand.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from dflash_ray.target.plain.mixers import DocumentBounds

CHUNK = 64  # of flash-linear-attention's inverses
# columns of the state per program: 718 us for 14,416 tokens of Qwen3.6-27B on an H200, 994 with 128; 32 gave NaN (triton 3.6)
COLUMNS, WARPS = 64, 4


@functools.cache
def stages_for(device: torch.device) -> int:
    """Chunks loaded ahead: two where 108 KB of shared memory are there, else one (776 us)."""
    small = device.type == "cuda" and torch.cuda.get_device_properties(device).shared_memory_per_block_optin < 108_000
    return 1 if small else 2


@triton.jit
def _delta_kernel(
    q, k, v, g, beta, inverse, out, bounds, order, scale,
    NK: tl.constexpr, NV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    document = tl.load(order + tl.program_id(1) // NV)
    head = tl.program_id(1) % NV
    start = tl.load(bounds + document)
    length = (tl.load(bounds + document + 1) - start).to(tl.int32)
    q += (start * NK + head // (NV // NK)) * DK
    k += (start * NK + head // (NV // NK)) * DK
    v += (start * NV + head) * DV
    out += (start * NV + head) * DV
    inverse += (start * NV + head) * C
    g += start * NV + head
    beta += start * NV + head
    step, key, value = tl.arange(0, C), tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV)
    in_key, in_value = (key < DK)[None], (value < DV)[None]
    causal = step[:, None] >= step[None]
    state = tl.zeros((BK, BV), tl.float32)
    for first in tl.range(0, length, C, num_stages=STAGES):
        row = first + step
        real = row < length
        from_key, from_value = row[:, None] * NK * DK + key[None], row[:, None] * NV * DV + value[None]
        b_q = tl.load(q + from_key, mask=real[:, None] & in_key, other=0.0)
        b_k = tl.load(k + from_key, mask=real[:, None] & in_key, other=0.0)
        b_v = tl.load(v + from_value, mask=real[:, None] & in_value, other=0.0)
        b_inverse = tl.load(inverse + row[:, None] * NV * C + step[None], mask=real[:, None] & causal, other=0.0)
        b_g = tl.load(g + row * NV, mask=real, other=0.0)  # base-2 logarithm of e
        b_beta = tl.load(beta + row * NV, mask=real, other=0.0)
        last = tl.load(g + (tl.minimum(first + C, length) - 1) * NV)
        pair = tl.where(causal & real[:, None], tl.exp2(b_g[:, None] - b_g[None]), 0.0)
        scores = (tl.dot(b_q, tl.trans(b_k)) * pair).to(b_k.dtype)
        grown, low = tl.exp2(b_g)[:, None], state.to(b_k.dtype)
        rest = b_beta[:, None] * (b_v.to(tl.float32) - grown * tl.dot(b_k, low))
        y = grown * tl.dot(b_q, low)
        pseudo = tl.dot(b_inverse, rest.to(b_k.dtype))
        y = tl.dot(scores, pseudo.to(b_k.dtype), y)
        tl.store(out + from_value, (y * scale).to(out.dtype.element_ty), mask=real[:, None] & in_value)
        left = (pseudo * tl.exp2(last - b_g)[:, None]).to(b_k.dtype)
        state = tl.dot(tl.trans(b_k), left, state * tl.exp2(last))


def delta_chunks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, inverse: torch.Tensor, bounds: torch.Tensor,
    order: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """q, k [T, Nk, Dk] of length 1, v [T, Nv, Dv], g float32 [T, Nv] summed from each chunk's start and over log 2, beta [T, Nv],
    inverse [T, Nv, C], bounds int64 [D+1], order [D]: documents in the order they are started, long ones first. All contiguous.

    Returns [T, Nv, Dv]. Of the inverses only the lower triangles are read.
    """
    (_, nk, dk), (_, nv, dv) = k.shape, v.shape
    block_k = max(triton.next_power_of_2(dk), 16)
    out = torch.empty_like(v)
    grid = (triton.cdiv(dv, COLUMNS), order.shape[0] * nv)
    _delta_kernel[grid](
        q, k, v, g, beta, inverse, out, bounds, order, dk**-0.5,
        nk, nv, dk, dv, block_k, COLUMNS, CHUNK, stages_for(k.device), num_warps=WARPS,
    )  # fmt: skip
    return out


def delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, *, bounds: DocumentBounds
) -> torch.Tensor:
    """`plain.fused.delta_rule`."""
    from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_kkt_solve_kernel as inverse_kernel
    from fla.ops.utils import chunk_local_cumsum
    from fla.ops.utils.constant import RCP_LN2

    starts, chunks, order = bounds.delta_index
    (tokens, nk, dk), nv = k.shape, v.shape[1]
    summed = chunk_local_cumsum(g[None], chunk_size=CHUNK, scale=RCP_LN2, cu_seqlens=starts, chunk_indices=chunks)
    inverse = torch.empty(tokens, nv, CHUNK, device=k.device, dtype=k.dtype)
    inverse_kernel[(len(chunks), nv)](
        k=k, g=summed, beta=beta, A=inverse, cu_seqlens=starts, chunk_indices=chunks, T=tokens, H=nk, HV=nv, K=dk, BT=CHUNK, BC=16
    )
    return delta_chunks(q, k, v, summed[0], beta, inverse, starts, order)
