"""x @ weight.T in float32 on a CPU, by the faster of the two libraries that torch brings.

torch hands float32 matmuls to MKL, which on AMD processors stays with AVX2: 98 GFLOP/s on one core of an EPYC, where oneDNN's AVX-512
kernels reach 220. So on such a processor `linear` calls oneDNN, forward and backward; everywhere else it is `F.linear`. oneDNN compiles a
kernel for every shape (0.4 ms) and keeps 1,024, so rows are padded to a few sizes. The choice depends on the processor and the shape
alone: equal runs stay equal bit by bit.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
import torch.nn.functional as F

SMALL = 500_000  # multiply-adds below which setting up oneDNN's call (9 us) costs more than it gains
SMALL_PACKED = 300_000  # the same for a weight packed beforehand
FEW_ROWS = 16  # rows are padded to multiples of this
_STEPS = 16  # sizes per doubling of the number of rows: at most a sixteenth of them is padding, beyond the first 256


@functools.cache
def prefers_onednn() -> bool:
    """Whether this processor runs float32 matmuls faster in oneDNN than in MKL."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise") or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def takes_onednn(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `linear` of these goes to oneDNN."""
    rows = x.numel() // x.shape[-1]
    float32 = x.dtype == weight.dtype == torch.float32
    return rows * weight.numel() >= SMALL and float32 and x.device.type == "cpu" and prefers_onednn()


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear`: x [..., in], weight [out, in], bias [out] -> [..., out]."""
    if not takes_onednn(x, weight):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)):
        return _OnednnLinear.apply(x, weight) if bias is None else F.linear(x, weight, bias)
    rows = x.numel() // x.shape[-1]
    return _onednn_linear(_padded(x.reshape(rows, -1)), weight, bias)[:rows].view(*x.shape[:-1], -1)


def _onednn_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _padded(x: torch.Tensor) -> torch.Tensor:
    """x [rows, in] with zero rows below it, up to the next size."""
    rows = x.shape[0]
    step = max(FEW_ROWS, 1 << max(0, rows.bit_length() - _STEPS.bit_length()))
    missing = -rows % step
    return F.pad(x, (0, 0, 0, missing)) if missing else x


class _OnednnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        rows = x.numel() // x.shape[-1]
        return _onednn_linear(_padded(x.reshape(rows, -1)), weight)[:rows].view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = x.numel() // x.shape[-1]
        flat = _padded(gradient.reshape(rows, -1))
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = _onednn_linear(flat, weight.t())[:rows].view(x.shape)
        if ctx.needs_input_grad[1]:
            of_weight = _onednn_linear(flat.t(), _padded(x.reshape(rows, -1)).t())
        return of_x, of_weight


class FrozenLinear:
    """A frozen matrix [out, in] and bias that many matmuls read: `linear`, and on a CPU fast for few rows too.

    One to three rows, the case of decoding, are bound by reading the weight and are fastest from a transposed copy (0.45 instead of
    0.8 ms for 5 million weights); a block of rows is fastest in oneDNN from a packed copy (1.2 instead of 2.1 ms for 8 rows), unless the
    matrix is small. The copies are made by `expect_few_rows`, for models that decode.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self._transposed: torch.Tensor | None = None
        self._packed: torch.Tensor | None = None

    def expect_few_rows(self) -> None:
        if self.weight.device.type != "cpu" or self.weight.dtype != torch.float32:
            return
        self._transposed = self.weight.t().contiguous()
        if prefers_onednn():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.contiguous(), FEW_ROWS)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out]."""
        if self._transposed is not None:
            rows = x.numel() // x.shape[-1]
            if rows <= 3 or rows * self.weight.numel() < SMALL_PACKED:
                out = torch.mm(x.view(rows, -1), self._transposed)
                out = out if self.bias is None else out + self.bias
                return out if x.dim() == 2 else out.view(*x.shape[:-1], -1)
            if self._packed is not None and rows < FEW_ROWS:
                out = _onednn_linear(x.view(rows, -1), self._packed, self.bias)
                return out if x.dim() == 2 else out.view(*x.shape[:-1], -1)
        return linear(x, self.weight, self.bias)
