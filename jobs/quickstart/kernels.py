"""The two operations of a gated-delta-net layer in plain torch, for a CPU and for training on short rows.

transformers binds flash-linear-attention's CUDA kernels at import, whatever the device: on a CPU they fail, and their backward pass
refuses some pairs of GPU and triton. `plain` puts back the torch functions that transformers has beside them. `short_rows` puts in the
forms below, which do the same for whole rows of a training batch with about 100 large operations a layer and no triangular solver.
"""

import functools
import inspect
from collections.abc import Callable

import torch
import torch.nn.functional as F

BLOCK = 16
NAMES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn", "causal_conv1d_update")


def hybrid_module():
    from transformers.models.qwen3_5 import modeling_qwen3_5

    return modeling_qwen3_5


def _dropping_unknown(function: Callable) -> Callable:
    known = inspect.signature(function).parameters

    @functools.wraps(function)  # so that unwrapping it again ends at the same function
    def call(*args, **kwargs):
        return function(*args, **{k: v for k, v in kwargs.items() if k in known})

    return call


def plain() -> None:
    """transformers' own torch functions, for any device, with and without a cache."""
    modeling = hybrid_module()
    for name in NAMES:
        setattr(modeling, name, _dropping_unknown(inspect.unwrap(getattr(modeling, name))))


def short_rows() -> None:
    """The functions below, for training only: they know no cache and no padding on the left."""
    plain()
    modeling = hybrid_module()
    modeling.torch_chunk_gated_delta_rule = _dropping_unknown(functools.wraps(modeling.torch_chunk_gated_delta_rule)(delta_rule))
    modeling.causal_conv1d_fn = _dropping_unknown(functools.wraps(modeling.causal_conv1d_fn)(causal_conv))


def causal_conv(hidden_states: torch.Tensor, weight: torch.Tensor, bias=None, activation: str | None = None) -> torch.Tensor:
    """[B, C, T] x [C, K] -> [B, C, T]: K shifted products, because a depthwise convolution's backward pass is slow."""
    assert bias is None and activation in (None, "silu")
    taps, length = weight.shape[1], hidden_states.shape[-1]
    padded = F.pad(hidden_states, (taps - 1, 0))
    out = sum(padded[..., k : k + length] * weight[:, k, None] for k in range(taps))
    return (F.silu(out) if activation else out).to(hidden_states.dtype)


def delta_rule(query, key, value, g, beta, initial_state=None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = True):
    """query, key [B, T, Hk, D], value [B, T, Hv, Dv], g, beta [B, T, Hv] -> ([B, T, Hv, Dv], None), in float32 inside.

    With no state before the row, token i writes u_i = beta_i (v_i - sum over j < i of decay_ij (k_i . k_j) u_j) and reads
    sum over j <= i of decay_ij (q_i . k_j) u_j (Yang et al., Gated Delta Networks, 2024). The unit lower triangular system for u is
    solved a block of 16 tokens after the other; a block's inverse is (1 - A)(1 + A^2)(1 + A^4)(1 + A^8), exact because A^16 = 0.
    """
    assert initial_state is None and not output_final_state and use_qk_l2norm_in_kernel
    dtype, length = value.dtype, value.shape[1]
    with torch.autocast(value.device.type, enabled=False):
        query, key, value = (F.pad(x.transpose(1, 2).float(), (0, 0, 0, -length % BLOCK)) for x in (query, key, value))
        g, beta = (F.pad(x.transpose(1, 2).float(), (0, -length % BLOCK)) for x in (g, beta))
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
        query = query * query.shape[-1] ** -0.5
        groups = value.shape[1] // key.shape[1]
        query, key = (x.repeat_interleave(groups, dim=1) for x in (query, key))
        total = value.shape[2]
        sums = g.cumsum(-1)
        above = torch.ones(total, total, dtype=torch.bool, device=g.device).triu(1)
        decay = (sums[..., :, None] - sums[..., None, :]).masked_fill(above, float("-inf")).exp()  # [B, Hv, T, T]
        reads = (query @ key.transpose(-1, -2)) * decay
        system = (key @ key.transpose(-1, -2) * decay * beta[..., None]).tril(-1)
        blocks = system.unflatten(-2, (-1, BLOCK)).unflatten(-1, (-1, BLOCK)).diagonal(dim1=-4, dim2=-2)  # [B, Hv, 16, 16, T/16]
        power = blocks.movedim(-1, -3)
        one = torch.eye(BLOCK, device=g.device)
        inverse = one - power
        for _ in range(3):
            power = power @ power
            inverse = inverse + inverse @ power
        wanted = value * beta[..., None]
        written = inverse[..., 0, :, :] @ wanted[..., :BLOCK, :]
        for i in range(1, total // BLOCK):
            rows = slice(i * BLOCK, (i + 1) * BLOCK)
            known = system[..., rows, : i * BLOCK] @ written
            written = torch.cat((written, inverse[..., i, :, :] @ (wanted[..., rows, :] - known)), dim=-2)
        return (reads @ written)[..., :length, :].transpose(1, 2).to(dtype), None
