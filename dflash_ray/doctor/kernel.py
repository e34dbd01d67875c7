"""A Triton kernel of one line. Importing this needs triton, running it a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _add_one(x, BLOCK: tl.constexpr):
    at = x + tl.arange(0, BLOCK)
    tl.store(at, tl.load(at) + 1)


def add_one() -> bool:
    """True if the kernel computes something else than 0 + 1."""
    x = torch.zeros(128, device="cuda")
    _add_one[(1,)](x, BLOCK=128)
    return not bool((x == 1).all())
