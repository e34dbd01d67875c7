"""Matmuls with the frozen weights: in the weights' dtype, or with weights and rows in e4m3.

Both are callables `[T, K] -> [T, N]` that can also add their result to a residual stream in place. In 8 bits every output channel of a
weight and every row of the input has a scale of its own, so one large activation costs precision in its own row only.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dflash_ray.target.plain.fused import Quantised, quantise


class Matmul:
    """x W^T + b with W [N, K] as it is."""

    fp8 = False

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def add_to(self, stream: ResidualStream, x: torch.Tensor) -> None:
        """Adds the result to the stream in the matmul's own epilogue: the sum is rounded once and costs no pass of its own."""
        stream.settle()
        stream.x.addmm_(x, self.weight.t())
        if self.bias is not None:
            stream.x += self.bias


class Fp8Matmul:
    """The same with W in e4m3, scaled per output channel, and x as `Quantised` rows."""

    fp8 = True

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.width, inner = weight.shape
        if inner % 16:
            raise ValueError(f"target.precision: fp8 needs sizes that are multiples of 16, a weight is {list(weight.shape)}; use bf16")
        quantised = quantise(F.pad(weight, (0, 0, 0, -self.width % 16)))  # the result's width has to be such a multiple too
        self.values, self.scale = quantised.values, quantised.scale.t().contiguous()
        self.bias, self.dtype = bias, weight.dtype

    def __call__(self, x: Quantised) -> torch.Tensor:
        """[T, N], its rows possibly further apart than N."""
        if x.values.device.type == "cuda":
            out = torch._scaled_mm(x.values, self.values.t(), x.scale, self.scale, out_dtype=self.dtype, use_fast_accum=True)
        else:
            out = ((x.values.float() @ self.values.float().t()) * x.scale * self.scale).to(self.dtype)
        out = out[:, : self.width]
        return out if self.bias is None else out + self.bias

    def add_to(self, stream: ResidualStream, x: Quantised) -> None:
        """The result waits in the stream and is added by the next norm: there is no 8-bit matmul that adds."""
        stream.settle()
        stream.pending = self(x)


class ResidualStream:
    """The residual stream [T, H] of one pass, changed in place. `pending`, where there is one, still has to be added to `x`."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x
        self.pending: torch.Tensor | None = None

    def take_pending(self) -> torch.Tensor | None:
        pending, self.pending = self.pending, None
        return pending

    def settle(self) -> torch.Tensor:
        """`x` with nothing pending."""
        if self.pending is not None:
            self.x += self.take_pending()
        return self.x
