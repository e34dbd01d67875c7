"""Cases for the fused functions of the target: inputs, and what they should give, in float64 and token by token.

`python -m tests.support.kernel_cases` runs every kernel against its twin and the float64 values; with TRITON_INTERPRET=1 it needs no GPU.
"""

from __future__ import annotations

import cmath
import math

import numpy as np
import torch

from dflash_ray.target.plain.fused import Fused, Quantised, plain_fused
from dflash_ray.target.plain.mixers import DocumentBounds

# bf16 keeps 8 bits (half a step is at most 2^-8 of a value), e4m3 keeps 4 (2^-4); Triton's interpreter cuts bits off where a GPU rounds
BF16, FP8 = 3e-3, 4e-2
CUTTING = 2.0
LENGTHS = (5, 1, 37, 2)  # documents of a pass


def positions_of(lengths) -> torch.Tensor:
    return torch.cat([torch.arange(n) for n in lengths]).int()


def norm_cases(draw):
    """(name, arguments, keyword arguments, oracle); oracle gives the tensors, in float64, that the call returns or changes."""
    x, extra, weight = draw(6, 40), draw(6, 40), draw(40).float()

    def oracle(rows):
        out = []
        for row in rows:
            rms = math.sqrt(sum(v * v for v in row) / len(row) + 1e-6)
            out.append([v / rms * w for v, w in zip(row, weight.tolist(), strict=True)])
        return out

    yield "rms_norm", (x, weight, 1e-6), {}, lambda: oracle(x.double().tolist())
    stored = (x.float() + extra.float()).to(x.dtype).double().tolist()
    yield "rms_norm", (x.clone(), weight, 1e-6), {"add": extra}, lambda: (oracle(stored), stored)
    yield "rms_norm", (x, weight, 1e-6), {"fp8": True}, lambda: oracle(x.double().tolist())


def gate_cases(draw):
    def sigmoid(v):
        return 1 / (1 + math.exp(-v))

    gate_up = draw(5, 160)[:, : 2 * 72]

    def swiglu():
        return [[g * sigmoid(g) * u for g, u in zip(row[:72], row[72:], strict=True)] for row in gate_up.double().tolist()]

    yield "swiglu", (gate_up,), {}, swiglu
    yield "swiglu", (gate_up,), {"fp8": True}, swiglu
    mixed, joined = draw(5, 48), draw(5, 80)
    gate = joined[:, 32:]
    expected = [
        [m * sigmoid(g) for m, g in zip(a, b, strict=True)] for a, b in zip(mixed.double().tolist(), gate.double().tolist(), strict=True)
    ]
    yield "gate_output", (mixed.clone(), gate), {}, lambda: expected
    yield "gate_output", (mixed.clone(), gate), {"fp8": True}, lambda: expected
    yield "gate_output", (mixed, None), {"fp8": True}, lambda: mixed.double().tolist()
    heads, z, weight = draw(5, 3, 24), draw(5, 90)[:, 18:], draw(24).float()

    def gated_norm():
        out = []
        for row, gates in zip(heads.double().tolist(), z.double().tolist(), strict=True):
            flat = []
            for head in row:
                rms = math.sqrt(sum(v * v for v in head) / len(head) + 1e-6)
                flat += [v / rms * w for v, w in zip(head, weight.tolist(), strict=True)]
            out.append([v * g * sigmoid(g) for v, g in zip(flat, gates, strict=True)])
        return out

    yield "gated_norm", (heads.clone(), z, weight, 1e-6), {}, gated_norm
    yield "gated_norm", (heads.clone(), z, weight, 1e-6), {"fp8": True}, gated_norm


def rotation_cases(draw):
    """Turning is multiplication by a complex number; the last pairs of a partly rotating head stand still."""
    positions, dim, turning = positions_of(LENGTHS), 16, 4
    rates = [10000.0 ** (-i / turning) if i < turning else 0.0 for i in range(dim // 2)]
    angle = torch.tensor([[p * r for r in rates] for p in range(64)], dtype=torch.float64)
    cos, sin = angle.cos().float(), angle.sin().float()
    table = torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)
    for weight in (None, draw(3, dim).float()):
        joined = draw(len(positions), 5 * dim)

        def oracle(joined=joined, weight=weight):
            out = joined.double().tolist()
            for token, row in enumerate(out):
                for head in range(3):
                    values = row[head * dim : (head + 1) * dim]
                    if weight is not None:
                        rms = math.sqrt(sum(v * v for v in values) / dim + 1e-6)
                        values = [v / rms * w for v, w in zip(values, weight[head].tolist(), strict=True)]
                    for i in range(dim // 2):
                        turned = complex(values[i], values[i + dim // 2]) * cmath.exp(1j * positions[token].item() * rates[i])
                        row[head * dim + i], row[head * dim + i + dim // 2] = turned.real, turned.imag
            return out

        yield "norm_rope", (joined, 3, dim, weight, 1e-6, *table, positions), {}, oracle


def conv_cases(draw):
    positions, taps = positions_of(LENGTHS), 4
    k_heads, k_dim, v_heads, v_dim = 2, 8, 4, 12
    channels = 2 * k_heads * k_dim + v_heads * v_dim
    joined, weight = draw(len(positions), channels + 7), draw(taps, channels)

    def oracle():
        x, w = joined.double(), weight.double()
        out = torch.zeros(len(positions), channels, dtype=torch.float64)
        start = 0
        for length in LENGTHS:
            for t in range(length):
                for back in range(min(taps, t + 1)):
                    out[start + t] += w[taps - 1 - back] * x[start + t - back, :channels]
            start += length
        out = out / (1 + (-out).exp())
        q, k, v = out.split((k_heads * k_dim, k_heads * k_dim, v_heads * v_dim), 1)
        q, k = (part.unflatten(1, (k_heads, k_dim)) for part in (q, k))
        q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
        return q, k, v.unflatten(1, (v_heads, v_dim))

    yield "conv_heads", (joined, weight, k_heads, k_dim, v_heads, v_dim, positions), {}, oracle
    b, a = draw(len(positions), 11)[:, 1:11].split(5, 1)
    rate, bias = -draw(5).float().exp(), draw(5).float()

    def decays():
        g = [
            [r * math.log1p(math.exp(v + d)) for v, r, d in zip(row, rate.tolist(), bias.tolist(), strict=True)]
            for row in a.double().tolist()
        ]
        return g, [[1 / (1 + math.exp(-v)) for v in row] for row in b.double().tolist()]

    yield "decays", (b, a, rate, bias), {}, decays


def all_cases(dtype: torch.dtype = torch.bfloat16, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    for cases in (norm_cases, gate_cases, rotation_cases, conv_cases):
        yield from cases(draw)


def run_case(functions: Fused, name: str, args: tuple, kwargs: dict, device: torch.device) -> list[torch.Tensor]:
    """What the call returns and what it changes in place, in float64 on the host."""
    moved = [_move(arg, device) for arg in args]
    out = getattr(functions, name)(*moved, **{key: _move(value, device) for key, value in kwargs.items()})
    if out is None:
        out = moved[0]
    if "add" in kwargs:
        out = (out, moved[0])
    parts = out if isinstance(out, tuple) else (out,)
    return [(p.values.double() * p.scale if isinstance(p, Quantised) else p.double()).cpu() for p in parts]


def _move(value, device: torch.device):
    """A copy on `device` that keeps strides, so that column slices stay slices."""
    if not isinstance(value, torch.Tensor):
        return value
    whole = value._base if value._base is not None else value
    return whole.to(device, copy=True).as_strided(value.shape, value.stride(), value.storage_offset())


def distance(found: list[torch.Tensor], expected) -> float:
    """Largest relative distance of any returned tensor."""
    wanted = expected if isinstance(expected, tuple) else (expected,)
    wanted = [torch.as_tensor(w, dtype=torch.float64) for w in wanted]
    assert [f.shape for f in found] == [w.shape for w in wanted]
    return max(((f - w).norm() / w.norm()).item() for f, w in zip(found, wanted, strict=True))


def compare_kernels(device: torch.device) -> None:
    """Every kernel on `device` (interpreted, if that is a CPU) against its twin and the float64 values."""
    from dflash_ray.target.kernels.fused import kernel_fused

    slack = CUTTING if device.type == "cpu" else 1.0
    kernels, twins = kernel_fused(), plain_fused()
    for name, args, kwargs, oracle in all_cases():
        limit = slack * (FP8 if kwargs.get("fp8") else BF16)
        found = run_case(kernels, name, args, kwargs, device)
        twin = run_case(twins, name, args, kwargs, torch.device("cpu"))
        exact, between = distance(found, oracle()), distance(found, tuple(twin))
        print(f"{name:12} {sorted(kwargs)} from float64 {exact:.1e}, from the twin {between:.1e}")
        assert exact < limit and between < limit, name


MIXED = np.array([5, 1, 150, 64, 70])  # documents below, at and past a chunk and a block of queries


def compare_attention(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, window: int | None) -> None:
    """The attention kernel against softmax written out in float64."""
    from dflash_ray.target.kernels import attention as kernels

    generator = torch.Generator().manual_seed(0)
    joined = torch.randn(int(MIXED.sum()), (heads + 2 * kv_heads) * dim, generator=generator).to(dtype)
    bounds = np.concatenate([[0], np.cumsum(MIXED)])
    blocks = torch.from_numpy(kernels.query_blocks(MIXED, device)).to(device)
    cut = DocumentBounds(torch.from_numpy(bounds.astype(np.int32)).to(device), tuple(MIXED.tolist()), None, blocks)
    widths = (heads * dim, kv_heads * dim, kv_heads * dim)
    q, k, v = (part.unflatten(-1, (-1, dim)) for part in joined.to(device).split(widths, -1))
    found = kernels.attention(q, k, v, scale=0.3, window=window, bounds=cut)
    q, k, v = (part.unflatten(-1, (-1, dim)) for part in joined.double().split(widths, -1))
    expected = torch.zeros(len(joined), heads, dim, dtype=torch.float64)
    for start, end in zip(bounds, bounds[1:], strict=False):
        for row in range(start, end):
            seen = slice(max(start, row - (window or end) + 1), row + 1)
            for head in range(heads):
                weight = torch.softmax(0.3 * k[seen, head // (heads // kv_heads)] @ q[row, head], 0)
                expected[row, head] = weight @ v[seen, head // (heads // kv_heads)]
    error = distance([found.double().cpu()], expected.flatten(1))
    print(f"attention {heads}/{kv_heads} heads of {dim}, window {window}: from float64 {error:.1e}")
    assert error < 4e-3


def compare_delta(device: torch.device, dtype: torch.dtype, k_heads: int, k_dim: int, v_heads: int, v_dim: int) -> None:
    """The delta kernel against the recurrence in float64; on a CPU with inverses from float64, on a GPU with the library's."""
    from dflash_ray.target.kernels import delta as kernels

    generator = torch.Generator().manual_seed(0)
    tokens, bounds = int(MIXED.sum()), np.concatenate([[0], np.cumsum(MIXED)])
    q, k = torch.randn(2, tokens, k_heads, k_dim, generator=generator).add(0.5).unbind(0)
    q, k = (torch.nn.functional.normalize(part, dim=-1).to(dtype) for part in (q, k))
    v = torch.randn(tokens, v_heads, v_dim, generator=generator).to(dtype)
    g = -0.3 * torch.rand(tokens, v_heads, generator=generator)
    beta = torch.rand(tokens, v_heads, generator=generator)
    expected = torch.zeros(tokens, v_heads, v_dim, dtype=torch.float64)
    summed, inverse = torch.zeros(tokens, v_heads), torch.full((tokens, v_heads, kernels.CHUNK), 7.0, dtype=dtype)
    for start, end in zip(bounds, bounds[1:], strict=False):
        for head in range(v_heads):
            keys, queries = (part[:, head // (v_heads // k_heads)].double() for part in (k, q))
            state = torch.zeros(k_dim, v_dim, dtype=torch.float64)
            for t in range(start, end):
                state = state * g[t, head].double().exp()
                state += torch.outer(keys[t], beta[t, head].double() * (v[t, head].double() - state.T @ keys[t]))
                expected[t, head] = state.T @ queries[t] / k_dim**0.5
            for first in range(start, end, kernels.CHUNK):
                part = slice(first, min(first + kernels.CHUNK, end))
                decay = g[part, head].double().cumsum(0)
                system = (keys[part] @ keys[part].T * (decay[:, None] - decay).exp() * beta[part, head].double()[:, None]).tril(-1)
                inverse[part, head, : len(system)] = torch.linalg.inv(system + torch.eye(len(system))).tril().to(dtype)
                summed[part, head] = (decay / math.log(2)).float()
    if device.type == "cuda":
        from dflash_ray.target.kernels.mixers import kernel_bounds

        cut = kernel_bounds(bounds.astype(np.int64), device, delta=True)
        found = kernels.delta_rule(*(part.to(device) for part in (q, k, v, g, beta)), bounds=cut)
    else:
        order = torch.from_numpy(np.argsort(-MIXED))
        found = kernels.delta_chunks(q, k, v, summed, beta, inverse, torch.from_numpy(bounds), order)
    error = distance([found.double().cpu()], expected)
    print(f"delta rule {k_heads} x {k_dim}, {v_heads} x {v_dim}: from float64 {error:.1e}")
    assert error < 8e-3


def compare_all(device: torch.device) -> None:
    """Everything of the fast path that is a kernel."""
    compare_kernels(device)
    # Triton's interpreter takes the operands of a bf16 matmul for integers
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    for heads, kv_heads, dim, window in ((4, 2, 16, None), (2, 1, 24, None), (2, 2, 16, 9), (2, 1, 16, 130)):
        compare_attention(device, dtype, heads, kv_heads, dim, window)
    for k_heads, k_dim, v_heads, v_dim in ((2, 16, 4, 32), (1, 8, 2, 12), (1, 128, 3, 128)):
        compare_delta(device, dtype, k_heads, k_dim, v_heads, v_dim)


if __name__ == "__main__":
    compare_all(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
