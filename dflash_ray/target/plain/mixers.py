"""The functions that mix tokens, in plain torch: what runs on a CPU, and the oracle of the kernels.

`devices.mixers_for` chooses between them and the kernels. Each function takes `DocumentBounds`: either a rectangle whose rows are
documents of their own (right padding is harmless, everything here is causal), or one row of documents end to end with `cu_seqlens`, none
of which may see another. These functions take `cu_seqlens` as seriously as the kernels do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

CHUNK = 64  # tokens per step of the chunked delta rule


@dataclass(frozen=True)
class DocumentBounds:
    """Where the documents of one forward pass begin and end."""

    cu_seqlens: torch.Tensor | None = None  # int32 [D+1] on the device, or None: every row is one document
    lengths: tuple[int, ...] = ()  # with cu_seqlens: tokens of each document
    # what CUDA's kernels derive from cu_seqlens, made once per pass by `kernels.mixers.kernel_bounds`
    delta_index: tuple[torch.Tensor, ...] | None = None
    query_blocks: torch.Tensor | None = None

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Start and end of each document, read from `cu_seqlens`."""
        bounds = self.cu_seqlens.tolist()
        return list(zip(bounds, bounds[1:], strict=False))


@dataclass(frozen=True)
class Mixers:
    """attention(q [B,T,N,D], k, v [B,T,Nkv,D], scale, window, bounds) -> [B,T,N,D]
    short_conv(x [B,T,C], weight [C,W], bounds) -> [B,T,C], causal depthwise convolution and SiLU
    delta_rule(q, k [B,T,Nk,Dk], v [B,T,Nv,Dv], g, beta float32 [B,T,Nv], bounds) -> [B,T,Nv,Dv]; q and k are normalised inside
    delta_prefill(q, k, v, g, beta): the same on rows that are documents, and the state float32 [B,Nv,Dk,Dv] after the last token
    """

    attention: Callable[..., torch.Tensor]
    short_conv: Callable[..., torch.Tensor]
    delta_rule: Callable[..., torch.Tensor]
    delta_prefill: Callable[..., tuple[torch.Tensor, torch.Tensor]]


def plain_mixers() -> Mixers:
    """Plain torch, on whatever device the tensors are: the only choice on a CPU, the oracle on a GPU."""
    return Mixers(attention, short_conv, delta_rule, delta_prefill)


def _per_document(bounds: DocumentBounds, function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """`function` on every document of the one packed row, results end to end."""
    return torch.cat([function(*(tensor[:, start:end] for tensor in tensors)) for start, end in bounds.spans], dim=1)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, window: int | None, bounds: DocumentBounds
) -> torch.Tensor:
    """Causal attention inside each document; with `window` W a query sees the last W positions, its own included."""
    if bounds.cu_seqlens is not None:
        return _per_document(bounds, lambda *qkv: attention(*qkv, scale=scale, window=window, bounds=DocumentBounds()), q, k, v)
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


def short_conv(x: torch.Tensor, weight: torch.Tensor, *, bounds: DocumentBounds) -> torch.Tensor:
    if bounds.cu_seqlens is not None:
        return _per_document(bounds, lambda part: short_conv(part, weight, bounds=DocumentBounds()), x)
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


def delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, *, bounds: DocumentBounds, unit: bool = False
) -> torch.Tensor:
    if bounds.cu_seqlens is not None:
        return _per_document(bounds, lambda *parts: delta_rule(*parts, bounds=DocumentBounds(), unit=unit), q, k, v, g, beta)
    return delta_prefill(q, k, v, g, beta, unit=unit)[0]


def delta_prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, *, unit: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`delta_rule` on rows that are documents, and the state float32 [B, Nv, Dk, Dv] after the last token.

    A token with g = 0 and beta = 0 leaves the state as it was. `unit`: q and k come normalised.
    """
    batch, length, heads, width = v.shape
    qk, values, g, beta = delta_heads(torch.cat((q, k), 2), v, g, beta, unit=unit)
    state = values.new_zeros(batch * heads, q.shape[-1], width)
    outputs = []
    for start in range(0, length, CHUNK):
        part = slice(start, start + CHUNK)
        decay = g[:, part].cumsum(-1)
        out, pseudo = delta_chunk(qk[:, :, part], values[:, part], decay, beta[:, part], state)
        state = delta_state(qk[:, 1, part], pseudo, decay, state)
        outputs.append(out)
    out = torch.cat(outputs, dim=1).view(batch, heads, length, width).transpose(1, 2)
    return out.to(v.dtype), state.view(batch, heads, -1, width)


def delta_heads(qk: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, *, unit: bool = False) -> tuple[torch.Tensor, ...]:
    """Queries beside keys [B,T,2*Nk,Dk], v [B,T,Nv,Dv], g and beta [B,T,Nv] -> head-major float32 of B*Nv heads.

    Returns qk [B*Nv,2,T,Dk], v [B*Nv,T,Dv], g and beta [B*Nv,T]. Queries and keys become x / sqrt(sum x^2 + 1e-6) unless they are
    `unit` already; each key head comes once for every value head it serves.
    """
    batch, length, heads, _ = v.shape
    width = qk.shape[-1]
    qk = qk.float()
    if not unit:
        qk = qk * torch.rsqrt(qk.square().sum(-1, keepdim=True) + 1e-6)
    qk = qk.view(batch, length, 2, -1, width).permute(0, 3, 2, 1, 4)  # [B, Nk, 2, T, Dk]
    key_heads = qk.shape[1]
    if heads > key_heads:
        qk = qk.unsqueeze(2).expand(-1, -1, heads // key_heads, -1, -1, -1)
    qk = qk.reshape(batch * heads, 2, length, width)
    v = v.float().transpose(1, 2).reshape(batch * heads, length, -1)
    g, beta = (x.transpose(1, 2).reshape(batch * heads, length) for x in (g, beta))
    return qk, v, g, beta


def delta_chunk(
    qk: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk of the gated delta rule in closed form (Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks", section 3).

    The rule is S_t = e^{g_t} S_{t-1} + k_t u_t^T with u_t = beta_t (v_t - (e^{g_t} S_{t-1})^T k_t) and output S_t^T q_t / sqrt(Dk). Over a
    chunk the pseudo-values u solve one unit lower triangular system, and u_t depends on tokens up to t only: whatever is kept of them
    stays valid when later tokens of the chunk are thrown away.

    qk [N,2,T,Dk] normalised queries and keys, v [N,T,Dv], decay [N,T] = cumulative g inside the chunk, beta [N,T], state [N,Dk,Dv], all
    float32. Returns outputs and pseudo-values, both [N,T,Dv].
    """
    heads, _, length, width = qk.shape
    # [N,T,T]: decay from token j to token i, 0 for j after i
    pair = decayed(decay[:, :, None] - decay[:, None, :]) * _not_ahead(length, qk.device)
    flat = qk.reshape(heads, 2 * length, width)
    scores = torch.bmm(flat, flat[:, length:].transpose(1, 2)).view(heads, 2, length, length) * pair[:, None]
    reads = torch.bmm(flat, state).view(heads, 2, length, -1) * decayed(decay)[:, None, :, None]
    beta = beta[..., None]
    # the diagonal of the system is not read: the solver takes it as 1
    pseudo = torch.linalg.solve_triangular(scores[:, 1] * beta, (v - reads[:, 1]) * beta, upper=False, unitriangular=True)
    return torch.baddbmm(reads[:, 0], scores[:, 0], pseudo) * width**-0.5, pseudo


def decayed(g: torch.Tensor) -> torch.Tensor:
    """exp(g) for g <= 0. What is less than e^-60 counts as that, which no float32 sum notices: exp is up to a hundred times slower on a CPU
    where its result is subnormal or 0, and so are products of such results. Positive g, which has no meaning, counts as 0."""
    return g.clamp(-60.0, 0.0).exp()


@functools.cache
def _not_ahead(length: int, device: torch.device) -> torch.Tensor:
    """[T, T]: 0 where token j comes after token i, else 1."""
    return torch.ones(length, length, device=device).tril_()


def delta_state(k: torch.Tensor, pseudo: torch.Tensor, decay: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """State after the last of the given tokens, from the state before the first: one matmul, no recomputation."""
    last = decay[:, -1:]
    return torch.baddbmm(state * decayed(last)[..., None], (k * decayed(last - decay)[..., None]).transpose(1, 2), pseudo)


def delta_step(
    qk: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rule of `delta_chunk` for a single token: output [N,1,Dv] and the new state."""
    key = qk[:, 1]
    before = state * decayed(g)[..., None]
    pseudo = (v - torch.bmm(key, before)) * beta[..., None]
    state = torch.baddbmm(before, key.transpose(1, 2), pseudo)
    return torch.bmm(qk[:, 0], state) * qk.shape[-1] ** -0.5, state
