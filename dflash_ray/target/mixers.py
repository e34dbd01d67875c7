"""The three functions that mix tokens, chosen by the device in one place.

`mixers_for(device)` is the only way to them: plain torch on a CPU, kernels on CUDA. On a CPU nothing of triton or flash-linear-attention
is ever called, even where transformers has bound it at import. Each function takes `Rows`: either a rectangle whose rows are documents
of their own (right padding is harmless, everything here is causal), or one row of documents end to end with `cu_seqlens`, none of which
may see another. The CPU functions take `cu_seqlens` as seriously as the kernels do: what they compute is the oracle for both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

CHUNK = 64  # tokens per step of the chunked delta rule


@dataclass(frozen=True)
class Rows:
    """How the tokens of one forward pass fall into documents."""

    cu_seqlens: torch.Tensor | None = None  # int32 [D+1] on the device, or None: every row is one document
    lengths: tuple[int, ...] = ()  # with cu_seqlens: tokens of each document
    delta_index: tuple[torch.Tensor, torch.Tensor] | None = None  # what CUDA's delta rule derives from cu_seqlens, made once per pass

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Start and end of each document, read from `cu_seqlens`."""
        bounds = self.cu_seqlens.tolist()
        return list(zip(bounds, bounds[1:], strict=False))


@dataclass(frozen=True)
class Mixers:
    """attention(q [B,T,N,D], k, v [B,T,Nkv,D], scale, window, rows) -> [B,T,N,D]
    short_conv(x [B,T,C], weight [C,W], rows) -> [B,T,C], causal depthwise convolution and SiLU
    delta_rule(q, k [B,T,Nk,Dk], v [B,T,Nv,Dv], g, beta float32 [B,T,Nv], rows) -> [B,T,Nv,Dv]; q and k are normalised inside
    delta_prefill(q, k, v, g, beta): the same on rows that are documents, and the state float32 [B,Nv,Dk,Dv] after the last token
    """

    attention: Callable[..., torch.Tensor]
    short_conv: Callable[..., torch.Tensor]
    delta_rule: Callable[..., torch.Tensor]
    delta_prefill: Callable[..., tuple[torch.Tensor, torch.Tensor]]


def plain_mixers() -> Mixers:
    """Plain torch, on whatever device the tensors are: the only choice on a CPU, the oracle on a GPU."""
    return Mixers(attention, short_conv, delta_rule, delta_prefill)


def mixers_for(device: torch.device) -> Mixers:
    if device.type == "cpu":
        return plain_mixers()
    if device.type == "cuda":
        from dflash_ray.target import mixers_cuda

        return Mixers(mixers_cuda.attention, mixers_cuda.short_conv, mixers_cuda.delta_rule, mixers_cuda.delta_prefill)
    raise ValueError(f"device {device}: targets run on cpu or cuda")


def _per_document(rows: Rows, function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """`function` on every document of the one packed row, results end to end."""
    return torch.cat([function(*(tensor[:, start:end] for tensor in tensors)) for start, end in rows.spans], dim=1)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, window: int | None, rows: Rows) -> torch.Tensor:
    """Causal attention inside each document; with `window` W a query sees the last W positions, its own included."""
    if rows.cu_seqlens is not None:
        return _per_document(rows, lambda *qkv: attention(*qkv, scale=scale, window=window, rows=Rows()), q, k, v)
    length = q.shape[1]
    mask = None
    if window is not None and length > window:
        position = torch.arange(length, device=q.device)
        distance = position[:, None] - position[None]
        mask = (distance >= 0) & (distance < window)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None and length > 1, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2)


def short_conv(x: torch.Tensor, weight: torch.Tensor, *, rows: Rows) -> torch.Tensor:
    if rows.cu_seqlens is not None:
        return _per_document(rows, lambda part: short_conv(part, weight, rows=Rows()), x)
    return F.silu(conv_valid(F.pad(x, (0, 0, weight.shape[1] - 1, 0)), weight))


def conv_valid(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Depthwise convolution of x [B, T+W-1, C], whose first W-1 rows are the past, with weight [C, W]: [B, T, C]."""
    width = weight.shape[1]
    length = x.shape[1] - width + 1
    if length <= CHUNK:  # fewest calls; longer inputs are not worth W copies of the input
        return (x.unfold(1, width, 1) * weight).sum(-1)
    out = x[:, :length] * weight[:, 0]
    for i in range(1, width):
        out = torch.addcmul(out, x[:, i : i + length], weight[:, i])
    return out


def delta_rule(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, *, rows: Rows) -> torch.Tensor:
    if rows.cu_seqlens is not None:
        return _per_document(rows, lambda *parts: delta_rule(*parts, rows=Rows()), q, k, v, g, beta)
    return delta_prefill(q, k, v, g, beta)[0]


def delta_prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`delta_rule` on rows that are documents, and the state float32 [B, Nv, Dk, Dv] after the last token.

    A token with g = 0 and beta = 0 leaves the state as it was.
    """
    q, k = repeat_heads(normalise_queries(q), v.shape[2]), repeat_heads(l2_normalise(k.float()), v.shape[2])
    q, k, wide, g, beta = (x.transpose(1, 2) for x in (q, k, v.float(), g, beta))
    state = wide.new_zeros(*wide.shape[:2], k.shape[-1], v.shape[-1])
    outputs = []
    for start in range(0, q.shape[2], CHUNK):
        part = slice(start, start + CHUNK)
        decay = g[:, :, part].cumsum(-1)
        out, pseudo = delta_chunk(q[:, :, part], k[:, :, part], wide[:, :, part], decay, beta[:, :, part], state)
        state = delta_state(k[:, :, part], pseudo, decay, state)
        outputs.append(out)
    return torch.cat(outputs, dim=2).transpose(1, 2).to(v.dtype), state


def l2_normalise(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(sum x^2 + 1e-6) over the last axis, as flash-linear-attention and transformers do."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def normalise_queries(q: torch.Tensor) -> torch.Tensor:
    return l2_normalise(q.float()) * q.shape[-1] ** -0.5


def repeat_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, T, N, D] -> [B, T, heads, D]: each key head once for every value head it serves."""
    batch, length, n, width = x.shape
    return x if n == heads else x.unsqueeze(3).expand(-1, -1, -1, heads // n, -1).reshape(batch, length, heads, width)


def delta_chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk of the gated delta rule in closed form (Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks", section 3).

    The rule is S_t = e^{g_t} S_{t-1} + k_t u_t^T with u_t = beta_t (v_t - (e^{g_t} S_{t-1})^T k_t) and output S_t^T q_t. Over a chunk the
    pseudo-values u solve one unit lower triangular system, and u_t depends on tokens up to t only: whatever is kept of them stays valid
    when later tokens of the chunk are thrown away.

    q, k [...,T,Dk], v [...,T,Dv], decay [...,T] = cumulative g inside the chunk, beta [...,T], state [...,Dk,Dv], all float32.
    Returns outputs and pseudo-values, both [...,T,Dv].
    """
    pair = (decay[..., :, None] - decay[..., None, :]).tril().exp().tril()  # [...,T,T]: decay from token j to token i
    grown = decay.exp()[..., None]
    keys = k.transpose(-1, -2)
    system = (k @ keys) * pair * beta[..., None]  # the diagonal is not read: the solver takes it as 1
    pseudo = torch.linalg.solve_triangular(system, beta[..., None] * (v - grown * (k @ state)), upper=False, unitriangular=True)
    return grown * (q @ state) + ((q @ keys) * pair) @ pseudo, pseudo


def delta_state(k: torch.Tensor, pseudo: torch.Tensor, decay: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """State after the last of the given tokens, from the state before the first: one product, no recomputation."""
    last = decay[..., -1:]
    return state * last.exp()[..., None] + (k * (last - decay).exp()[..., None]).transpose(-1, -2) @ pseudo
