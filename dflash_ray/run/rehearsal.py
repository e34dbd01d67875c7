"""The largest batch of a run, made up, so that running out of memory comes in the first minute and not in the third hour."""

from __future__ import annotations

import numpy as np
import torch

from dflash_ray.data.batches.batch import Batch
from dflash_ray.draft.trainer import DraftTrainer
from dflash_ray.target.model import FrozenTarget

LONGEST_DOCUMENT = 8192  # a longer one costs no more memory per token


def largest_batch(tokens: int, anchors: int, longest: int, layout: str = "packed") -> Batch:
    """All supervised, token 0 throughout, in documents of up to `longest` tokens; anchors evenly spread."""
    starts = np.append(np.arange(0, tokens, min(longest, LONGEST_DOCUMENT)), tokens).astype(np.int32)
    return Batch(
        number=0,
        epoch=0,
        sample_ids=np.arange(len(starts) - 1),
        input_ids=np.zeros(tokens, np.int32),
        cu_seqlens=starts,
        loss_mask=np.ones(tokens, np.uint8),
        anchors=np.linspace(0, tokens - 1, min(anchors, tokens)).astype(np.int32),
        layout=layout,
    )


def rehearse_target(target: FrozenTarget, tokens: int, anchors: int, block_size: int, *, teacher: bool) -> None:
    batch = largest_batch(tokens, anchors, target.shape.max_position_embeddings)
    target.features_and_teacher(batch, block_size) if teacher else target.features(batch)
    _free(target.device)


def rehearse_drafter(trainer: DraftTrainer, tokens: int, anchors: int) -> None:
    """Forward and backward beside as much memory as the optimizer will take; leaves no trace in the state."""
    batch = largest_batch(tokens, anchors, trainer.shape.max_position_embeddings)
    features = torch.ones(tokens, trainer.shape.features, dtype=trainer.dtype, device=trainer.device)
    positions = np.arange(tokens)
    rows = torch.ones(tokens, trainer.shape.hidden, dtype=trainer.dtype) if trainer.config.loss.needs_teacher else None
    moments = [torch.empty_like(parameter) for parameter in trainer.model.parameters() for _ in "12"]
    trainer.train_staged(trainer.stage(batch, features, None if rows is None else (positions, rows)))
    trainer.forget_gradients()
    del features, moments
    _free(trainer.device)


def _free(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
