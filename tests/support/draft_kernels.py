"""Every Triton kernel of the drafter beside its plain twin in float64: relative errors by name, on any device.

`python -m tests.support.draft_kernels` under TRITON_INTERPRET=1 prints them as JSON for kernels run by Triton's interpreter on a CPU.
"""

import json
import sys

import torch

from dflash_ray.config.schema import LossConfig
from dflash_ray.draft.blocks.mask import Blocks
from dflash_ray.draft.dflash import ops
from dflash_ray.draft.dflash.attention import plain_attention
from dflash_ray.draft.head import kernel_head, plain_head
from dflash_ray.draft.kernels import adamw, attention, rows
from tests.support.draft_cases import small_batch

# block size, key heads, query heads per key head, head size, window, lengths, anchors
ATTENTION = {
    "one document, full": (4, 2, 2, 16, None, (40,), (3, 20, 39)),
    "documents, sliding": (4, 2, 2, 16, 7, (40, 9, 30), (0, 3, 20, 39, 41, 49, 60, 78)),
    "window of one": (6, 1, 3, 16, 1, (40, 9, 30), (0, 3, 20, 39, 41, 49, 60, 78)),
    "every token an anchor": (5, 1, 4, 16, None, (33, 50), tuple(range(83))),
    "longer than a tile": (16, 1, 4, 32, 150, (300, 9, 290), (0, 1, 2, 130, 140, 149, 250, 299, 300, 308, 309, 500, 590, 598)),
    "longer than a tile, full": (16, 1, 4, 32, None, (300, 9, 290), (0, 1, 2, 130, 140, 149, 250, 299, 300, 308, 309, 500, 590, 598)),
    "a block fills a tile": (32, 1, 4, 16, 30, (70, 20), (10, 40, 69, 75)),
    "rows left over": (13, 2, 3, 16, 30, (70, 20), (10, 40, 44, 46, 69, 75, 76)),
    "first token only": (2, 1, 1, 16, 1, (20,), (0,)),
}


def error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """|ours - exact| / |exact|, absolute below 1 (some gradients are exactly 0); not a number if anything is."""
    exact = exact.double()
    return ((ours.double() - exact).norm() / exact.norm().clamp_min(1.0)).item()


class Draw:
    """Random rows of one dtype on one device."""

    def __init__(self, device, dtype, seed=0):
        self.generator, self.device, self.dtype = torch.Generator().manual_seed(seed), device, dtype

    def __call__(self, *size, dtype=None):
        return torch.randn(*size, generator=self.generator).to(self.device, dtype or self.dtype)


def row_errors(device, dtype, count=37, size=300) -> dict[str, float]:
    draw, eps, out = Draw(device, dtype), 1e-6, {}
    x, add, weight = draw(count, size), draw(count, size), 1 + 0.3 * draw(size, dtype=torch.float32)
    wide = [part.double() for part in (x, add, weight)]
    stream, normed = rows.norm(x, weight, eps, add)
    exact = ops.norm(wide[0] + wide[1], wide[2], eps)
    out |= {"norm stream": error(stream, exact[0]), "norm": error(normed, exact[1])}
    out["norm alone"] = error(rows.norm(x, weight, eps)[1], ops.norm(wide[0], wide[2], eps)[1])
    grad, residual = draw(count, size), draw(count, size)
    for given in (residual, None):
        ours, theirs = grad.clone(), grad.double()
        again, weight_grad = rows.norm_backward(x, weight, eps, ours, given)
        again_exact, weight_exact = ops.norm_backward(wide[0], wide[2], eps, theirs, None if given is None else given.double())
        name = f"norm backward{'' if given is None else ' with residual'}"
        out |= {name: error(ours, theirs), f"{name}, again": error(again, again_exact), f"{name}, weight": error(weight_grad, weight_exact)}
    both, grad = draw(count, 2 * size), draw(count, size)
    out["swiglu"] = error(rows.swiglu(both), ops.swiglu(both.double()))
    exact_both, exact_grad = both.double(), grad.double()
    ops.swiglu_backward(exact_both, exact_grad)
    rows.swiglu_backward(both, grad)
    out |= {"swiglu backward": error(both, exact_both), "swiglu again": error(grad, exact_grad)}
    for queries, keys in ((9, 3), (0, 3)):
        x, grad = draw(count, (queries + 2 * keys) * 32), draw(count, (queries + 2 * keys) * 32)
        weights = [1 + 0.3 * draw(32, dtype=torch.float32) for _ in range(2)]
        angle = draw(count, 16, dtype=torch.float32)
        turn = [angle.cos(), angle.sin()]
        exact_inputs = [part.double() for part in (x, *weights, *turn)]
        name = f"{queries}+{keys} heads"
        out[name] = error(rows.norm_rope(x, *weights, *turn, queries, keys, eps), ops.norm_rope(*exact_inputs, queries, keys, eps))
        exact = grad.double()
        ours_weights = rows.norm_rope_backward(x, *weights, *turn, queries, keys, eps, grad)
        exact_weights = ops.norm_rope_backward(*exact_inputs, queries, keys, eps, exact)
        out[f"{name} backward"] = error(grad, exact)
        for kind, ours, theirs in zip(("query", "key"), ours_weights, exact_weights, strict=True):
            if kind == "key" or queries:
                out[f"{name} {kind} weight"] = error(ours, theirs)
    return out


def attention_errors(device, dtype, case) -> dict[str, float]:
    block, keys, group, size, window, lengths, anchors = case
    draw, batch = Draw(device, dtype), small_batch(lengths, anchors)
    blocks, slots, tokens = Blocks.of(batch, block, device), len(anchors) * block, sum(lengths)
    turned, qkv = draw(slots, (group + 1) * keys * size), draw(slots, (group + 2) * keys * size)
    heads = [part.unflatten(1, (-1, size)) for part in (turned, qkv, draw(tokens, keys * size), draw(tokens, 2 * keys * size))]
    inputs = heads[0][:, : group * keys], heads[0][:, group * keys :], heads[1][:, -keys:], heads[2], heads[3][:, keys:]
    exact_inputs = [part.double() for part in inputs]
    out, log = attention.forward(*inputs, blocks, window)
    exact, _ = ops.attention(*exact_inputs, blocks, window)
    out_grad = draw(slots, group * keys, size)
    # poisoned: every element must be written
    counts = (slots, (group + 2) * keys), (tokens, 2 * keys)
    joined = [torch.full((count, number, size), float("nan"), dtype=dtype, device=device) for count, number in counts]
    grads = joined[0][:, : group * keys], joined[0][:, group * keys : -keys], joined[0][:, -keys:], joined[1][:, :keys], joined[1][:, keys:]
    attention.backward(*inputs, blocks, attention.Spans.of(blocks, window), out, log, out_grad, grads)
    exact_grads = tuple(torch.empty_like(part) for part in exact_inputs)
    ops.attention_backward(*exact_inputs, blocks, window, exact, None, out_grad.double(), exact_grads)
    names = ("query", "key", "value", "context key", "context value")
    return {"out": error(out, exact)} | {name: error(a, b) for name, a, b in zip(names, grads, exact_grads, strict=True)}


def autograd_errors(device, dtype) -> dict[str, float]:
    """The kernels as a function that autograd knows."""
    draw, blocks = Draw(device, dtype), Blocks.of(small_batch((40, 9), (3, 20, 41)), 4, device)
    inputs = [draw(*size).requires_grad_() for size in ((3, 4, 4, 16), (3, 4, 2, 16), (3, 4, 2, 16), (49, 2, 16), (49, 2, 16))]
    exact_inputs, grad = [part.detach().double().requires_grad_() for part in inputs], draw(3, 4, 4, 16)
    ours, exact = attention.BlockAttention.apply(*inputs, blocks, 7), plain_attention(*exact_inputs, blocks, 7)
    grads = zip(torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(exact, exact_inputs, grad.double()), strict=True)
    return {"out": error(ours, exact), "gradients": max(error(a, b) for a, b in grads)}


def head_errors(device, dtype, vocabulary=1000, count=37, chunk=16, objective=None, taught=False) -> dict[str, float]:
    draw, objective = Draw(device, dtype), objective or LossConfig(dpace=1.0)
    x, head = draw(count, 32), draw(vocabulary, 32) / 2
    # near the drafter's rows, as a teacher is: then KL is a small difference of large numbers
    teacher = x + draw(count, 32) / 4 if taught else None
    tokens = torch.randint(0, vocabulary, (count,), generator=torch.Generator().manual_seed(1)).to(device)
    ours = kernel_head(x, head, tokens, teacher, chunk, objective)
    # bf16 logits hide a teacher near the drafter by 2% of KL and 17% of the slope of |p - t|: then the twin has to read the same ones
    wide = dtype if taught and dtype == torch.bfloat16 else torch.float64
    exact = plain_head(x.to(wide), head.to(wide), tokens, None if teacher is None else teacher.to(wide), chunk, objective)
    silent = kernel_head(x, head, tokens, teacher, chunk, None)
    logits = x.double() @ head.double().T
    near = logits.gather(1, ours.guess[:, None])[:, 0] >= logits.max(1).values - logits.abs().max() * 2 * torch.finfo(dtype).eps
    out = {
        "log q": error(ours.log_q, exact.log_q),
        "without gradient": error(silent.log_q, exact.log_q),
        "guess": float((~near).float().mean()),
    }
    for name in ("hard", "by_weight", "by_anchors", "kl", "tv"):
        mine, reference = getattr(ours, name), getattr(exact, name)
        assert (mine is None) == (reference is None), name
        if mine is not None:
            out[name] = error(mine, reference)
    if taught:
        out |= {"kl without gradient": error(silent.kl, exact.kl), "tv without gradient": error(silent.tv, exact.tv)}
    return out


MIXTURES = {
    "kl": LossConfig(dpace=0.0, kl=1.0), "ce, kl": LossConfig(dpace=0.0, ce=0.5, kl=2.0), "tv": LossConfig(dpace=0.0, tv=1.0),
    "dpace kl": LossConfig(dpace=0.0, dpace_kl=1.0), "all": LossConfig(dpace=0.3, dpace_kl=0.6, ce=0.2, kl=0.4, tv=1.5),
}  # fmt: skip


def adamw_errors(device, copy_dtype) -> dict[str, float]:
    """Three updates beside torch's own in float64, and one with a norm that is not finite, which must change nothing."""
    draw = Draw(device, torch.float32)
    value = draw(70, 90)
    exact = torch.nn.Parameter(value.double())
    theirs = torch.optim.AdamW([exact], lr=0.1, betas=(0.8, 0.9), weight_decay=0.3)
    mean, square, copy = torch.zeros_like(value), torch.zeros_like(value), torch.empty_like(value, dtype=copy_dtype)
    settings = dict(scale=0.25, clip=1.0, lr=0.1, decay=0.3, betas=(0.8, 0.9), eps=1e-8)
    for step in (1, 2, 3):
        grad = draw(70, 90)
        norm = (grad * 0.25).norm()
        exact.grad = grad.double() * 0.25 * min(1.0, 1.0 / norm.item())
        theirs.step()
        adamw.adamw(value, grad, mean, square, copy, norm, step=step, **settings)
    out = {"value": error(value, exact.detach()), "copy": error(copy, exact.detach())}
    before = value.clone(), mean.clone(), square.clone()
    for bad in (float("nan"), float("inf")):
        adamw.adamw(value, draw(70, 90), mean, square, copy, torch.tensor(bad, device=device), step=4, **settings)
    return out | {"skipped": float(not all(torch.equal(a, b) for a, b in zip(before, (value, mean, square), strict=True)))}


def all_errors(device, dtype, cases=tuple(ATTENTION)) -> dict[str, dict[str, float]]:
    return {
        "rows": row_errors(device, dtype),
        **{f"attention: {name}": attention_errors(device, dtype, ATTENTION[name]) for name in cases},
        "attention: autograd": autograd_errors(device, dtype),
        "head": head_errors(device, dtype),
        **{f"head, teacher: {name}": head_errors(device, dtype, objective=mixture, taught=True) for name, mixture in MIXTURES.items()},
        "adamw": adamw_errors(device, torch.bfloat16),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    json.dump(all_errors("cpu", torch.float32), sys.stdout)
