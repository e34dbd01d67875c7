"""Features as they arrive: what is refused, and what is kept of a batch on the device until it is trained."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash_ray.data.batches.batch import Batch
from dflash_ray.draft.blocks.labels import Labels
from dflash_ray.draft.blocks.mask import Blocks
from dflash_ray.draft.dflash.shape import DraftShape


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
    """A batch that lies on the device, checked."""

    batch: Batch
    features: Tensor  # [T, L*H]
    labels: Labels
    blocks: Blocks
    teacher: Tensor | None  # [R, H]

    def use(self) -> None:
        """Call before the current stream reads it: its memory, which another stream allocated, is kept until that is done."""
        for part in (self.features, self.teacher, *vars(self.labels).values(), *vars(self.blocks).values()):
            if isinstance(part, Tensor) and part.is_cuda:
                part.record_stream(torch.cuda.current_stream())
