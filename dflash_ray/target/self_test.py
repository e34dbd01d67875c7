"""Whether the fast path may be used on this machine, found out at every start.

Layer by layer, on the weights just loaded: documents packed must mix to what each gives alone, the first tokens of a document looked at
apart, since that is where conv and recurrent state of the document before would leak. Each layer is given the packed stream, so an error
does not grow with depth and a limit of 1e-2 means the same in layer 1 and layer 60. One layer of each kind is also compared with plain
torch in float32, document by document; where plain torch in bf16 is far from that itself, the fast layer may be twice as far. The test
starts with a full-size pass of each kind, so kernels are compiled and tuned at the size they will run at, before any helper thread exists.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from dflash_ray.linear import FrozenLinear
from dflash_ray.target.fast import Documents, FastLayer, documents
from dflash_ray.target.layers import Layer, RotaryTable, Rotation
from dflash_ray.target.matmul import ResidualStream
from dflash_ray.target.plain.mixers import DocumentBounds, plain_mixers

LIMIT = 1e-2  # relative error that bf16 rounding stays well below and a leak does not
_LENGTHS = (70, 5, 131, 64, 1, 190)  # below, at and past the delta rule's chunks of 64
_FIRST = 8  # tokens of a document that are looked at apart
_WARM_DOCUMENTS = 8


class FastPathRefused(Exception):
    """The fast path computes something else than the plain one; the message says where and by how much."""


@dataclass
class KernelReport:
    """What the target runs per kind of layer and how far it was from its references; relative errors."""

    path: str = "plain torch, documents apart"
    reason: str = ""
    kernels: dict[str, str] = field(default_factory=dict)
    packed_against_alone: dict[str, float] = field(default_factory=dict)  # largest, per kind
    fast_error: dict[str, float] = field(default_factory=dict)  # of one layer of a kind, against plain torch in float32
    plain_error: dict[str, float] = field(default_factory=dict)  # the same of plain torch in the target's dtype
    fp8_feature_error: dict[int, float] = field(default_factory=dict)  # per tap, against the same layers in bf16


class SelfTest:
    """Fed every layer in order by `check`; holds the streams that run through them."""

    def __init__(self, embedding: torch.Tensor, table: RotaryTable, *, delta: bool, warm_tokens: int) -> None:
        self.device, self.warm_tokens = embedding.device, warm_tokens
        self.bounds = [0, *np.cumsum(_LENGTHS).tolist()]
        self.together = self._documents(_LENGTHS, table, delta)
        self.alone = [self._documents((n,), table, delta) for n in _LENGTHS]
        self.warm = None
        if warm_tokens:
            self.warm = self._documents((warm_tokens // _WARM_DOCUMENTS,) * _WARM_DOCUMENTS, table, delta)
        ids = torch.randint(0, embedding.shape[0], (self.bounds[-1],), generator=torch.Generator().manual_seed(0)).to(self.device)
        self.exact = ResidualStream(F.embedding(ids, embedding))
        self.rounded = ResidualStream(self.exact.x.clone())
        self.report = KernelReport(path="fused kernels, one packed pass")

    def _documents(self, lengths: tuple[int, ...], table: RotaryTable, delta: bool) -> Documents:
        return documents(np.array(lengths, dtype=np.int64), self.device, table(max(lengths)), delta=delta)

    @torch.no_grad()
    def check(self, index: int, plain: Layer, fast: FastLayer) -> None:
        """FastPathRefused if `fast` lets a document see another, or is not `plain`; then advances the stream through it."""
        kind, fused, report = plain.mixer.kind, fast.fused, self.report
        if self.warm is not None and kind not in report.kernels:
            x = torch.randn(self.warm.positions.shape[0], self.exact.x.shape[1], device=self.device).to(self.exact.x.dtype)
            fast(ResidualStream(x), self.warm)
        report.kernels[kind] = fused.kernels[kind]
        normed = fused.rms_norm(self.exact.settle(), plain.input_norm.weight, plain.input_norm.eps)
        packed = fast.mixer(normed, self.together, fused)
        worst = 0.0
        for document, (start, end) in enumerate(self.spans):
            alone = fast.mixer(normed[start:end], self.alone[document], fused)
            for tokens in (slice(0, _FIRST), slice(None)):
                error = _relative(packed[start:end][tokens], alone[tokens])
                where = f"the first {_FIRST} tokens of document" if tokens.stop else "document"
                self._refuse(error, index, kind, f"{where} {document + 1} packed and alone")
                worst = max(worst, error)
        report.packed_against_alone[kind] = max(worst, report.packed_against_alone.get(kind, 0.0))
        before = self.exact.x.clone()
        fast(self.exact, self.together)
        if kind not in report.fast_error:
            exact = self._plain(_in_float32(plain), before.float())
            report.fast_error[kind] = _relative(self.exact.settle(), exact)
            report.plain_error[kind] = _relative(self._plain(plain, before), exact)
            limit = max(LIMIT, 2 * report.plain_error[kind])
            self._refuse(report.fast_error[kind], index, kind, "this layer and plain torch in float32", limit)

    @property
    def spans(self) -> list[tuple[int, int]]:
        return list(zip(self.bounds, self.bounds[1:], strict=False))

    def _plain(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        """Output [T, H] of a plain layer, document by document."""
        out = []
        for (start, end), docs in zip(self.spans, self.alone, strict=True):
            turns = Rotation(docs.cos[None, : end - start, None], docs.sin[None, : end - start, None])
            out.append(layer(x[None, start:end], turns, DocumentBounds(), plain_mixers())[0])
        return torch.cat(out)

    def _refuse(self, error: float, index: int, kind: str, what: str, limit: float = LIMIT) -> None:
        if not error < limit:  # NaN too
            raise FastPathRefused(f"layer {index} ({kind}): {what} differ by {error:.1e}, more than {limit:.1e}")

    @torch.no_grad()
    def check_fp8(self, index: int, fast: FastLayer, taps: list[int]) -> None:
        """Runs the 8-bit layer on a stream of its own and notes how far a tap is from the exact one. Call after `check`."""
        fast(self.rounded, self.together)
        if index in taps:
            self.report.fp8_feature_error[index] = _relative(self.rounded.settle(), self.exact.settle())


def _in_float32(layer: Layer) -> Layer:
    def widened(part):
        wide = copy.copy(part)
        for name, value in vars(part).items():
            if isinstance(value, torch.nn.Module):
                setattr(wide, name, copy.deepcopy(value).float())
            elif isinstance(value, FrozenLinear):
                setattr(wide, name, widened(value))
            elif isinstance(value, torch.Tensor) and value.is_floating_point():
                setattr(wide, name, value.float())
        return wide

    return dataclasses.replace(layer, mixer=widened(layer.mixer), mlp=widened(layer.mlp))


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.float(), b.float()
    return ((a - b).norm() / b.norm()).item()


def fast_path_missing(device: torch.device, dtype: torch.dtype, *, delta: bool) -> str:
    """Why this machine cannot run the fast path at all, or nothing."""
    if device.type != "cuda":
        return ""
    if dtype != torch.bfloat16:
        return f"the varlen kernels run bf16, the target is {str(dtype).removeprefix('torch.')}"
    for module, package in (("triton", "triton"), ("fla", "flash-linear-attention")):
        if importlib.util.find_spec(module) is None and (module != "fla" or delta):
            return f"{package} is not installed"
    return ""
