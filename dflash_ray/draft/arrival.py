"""Features as they arrive: what is refused, how they get to the device, and what is kept of a batch until it is trained.

A copy from ordinary memory is done by the driver, which meanwhile lets no other thread of the process launch a kernel: steps beside it were
10% longer. So bytes go through pinned memory, piece by piece, filled by this thread while the piece before is on its way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash_ray.batch import Batch
from dflash_ray.draft.labels import Labels
from dflash_ray.draft.mask import Blocks
from dflash_ray.draft.shape import DraftShape

_PIECE = 32 << 20  # bytes


class FeatureError(ValueError):
    """What a target sent is not what the batch and the shape ask for."""


def check_features(batch: Batch, features: Tensor, shape: DraftShape, zero_tokens: np.ndarray | None = None) -> None:
    """FeatureError unless features are [T, L*H], bf16 or float32, finite, and no token's row is all zero.

    A row of zeros is a state that was never computed. Only tokens whose embedding is zero (`zero_tokens`, ids) may really have one.
    """
    where = f"batch {batch.number}: features"
    if features.dim() != 2 or features.shape[0] != batch.tokens or features.shape[1] != shape.features:
        raise FeatureError(
            f"{where} are {list(features.shape)}, expected {batch.tokens} tokens x "
            f"{len(shape.target_layer_ids)} taps x {shape.hidden} = {[batch.tokens, shape.features]}"
        )
    if features.dtype not in (torch.bfloat16, torch.float32):
        raise FeatureError(f"{where} are {features.dtype}; only bfloat16 and float32 are accepted")
    if batch.tokens == 0:
        return
    size = torch.linalg.vector_norm(features, ord=1, dim=1, dtype=torch.float32)  # NaN and infinity survive it
    smallest, total = torch.stack([size.min(), size.sum()]).tolist()  # one wait for the device
    if not math.isfinite(total):
        raise FeatureError(f"{where} hold NaN or infinity")
    if smallest == 0:
        empty = (size == 0).cpu().numpy() & ~np.isin(batch.input_ids, [] if zero_tokens is None else zero_tokens)
        if empty.any():
            raise FeatureError(f"{where} of {empty.sum()} tokens are all zero")


@dataclass(frozen=True)
class Staged:
    """A batch on the device, checked; `train_staged` or `evaluate_staged` uses it once."""

    batch: Batch
    features: Tensor  # [T, L*H]
    labels: Labels
    blocks: Blocks
    teacher: Tensor | None  # [R, H]
    ready: torch.cuda.Event | None  # when all of it is on the device

    def use(self) -> None:
        """Makes the current stream wait for it, and keeps its memory until that stream is done with it."""
        if self.ready is None:
            return
        stream = torch.cuda.current_stream()
        stream.wait_event(self.ready)
        for part in (self.features, self.teacher, *vars(self.labels).values(), *vars(self.blocks).values()):
            if isinstance(part, Tensor):
                part.record_stream(stream)


class PinnedCopy:
    """Copies host tensors to `device` in the current stream, for one thread. The source may be dropped when the call returns."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer: Tensor | None = None  # uint8, pinned, as large as the largest tensor so far
        self._free: torch.cuda.Event | None = None  # when the last copy has left the buffer

    def __call__(self, tensor: Tensor) -> Tensor:
        if self._device.type != "cuda" or tensor.device.type != "cpu" or not tensor.numel():
            return tensor.to(self._device, non_blocking=True)
        out = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        source, target = (part.view(-1).view(torch.uint8) for part in (tensor.contiguous(), out))
        if self._buffer is None or len(self._buffer) < len(source):
            self._buffer = torch.empty(len(source), dtype=torch.uint8, pin_memory=True)
        if self._free is not None:
            self._free.synchronize()
        for low in range(0, len(source), _PIECE):
            part = slice(low, min(low + _PIECE, len(source)))
            self._buffer[part].copy_(source[part])
            target[part].copy_(self._buffer[part], non_blocking=True)
        self._free = torch.cuda.Event()
        self._free.record()
        return out
