"""Which positions of a document become anchors.

A position can be an anchor if it and the next token are supervised. The choice depends on (seed, epoch, sample id) alone, never on the
batch a document stands in, on timing or on the number of targets.
"""

from __future__ import annotations

import numpy as np

from dflash_ray.random_streams import stream


def anchor_candidates(loss_mask: np.ndarray) -> np.ndarray:
    """int64 positions of one document's `loss_mask` [T] that are supervised and followed by a supervised token, ascending."""
    supervised = np.asarray(loss_mask) != 0
    return np.flatnonzero(supervised[:-1] & supervised[1:])


def anchor_count(lengths: np.ndarray, candidates: np.ndarray, tokens_per_anchor: float) -> np.ndarray:
    """int64 anchors per document: max(1, round(tokens / tokens_per_anchor)), at most the candidates (so 0 where there are none)."""
    wanted = np.maximum(1.0, np.rint(np.asarray(lengths, np.float64) / tokens_per_anchor))
    return np.minimum(np.asarray(candidates, np.float64), wanted).astype(np.int64)


def choose_anchors(loss_mask: np.ndarray, tokens_per_anchor: float, seed: int, epoch: int, sample_id: int) -> np.ndarray:
    """int32 anchor positions of one document in one epoch, ascending, drawn without replacement; each candidate is equally likely."""
    return _draw(loss_mask, tokens_per_anchor, stream("anchors", seed, epoch, sample_id))


def fixed_anchors(loss_mask: np.ndarray, tokens_per_anchor: float, seed: int, sample_id: int) -> np.ndarray:
    """The same for validation: one choice for the whole run, so that two validations compare the same blocks."""
    return _draw(loss_mask, tokens_per_anchor, stream("validation anchors", seed, sample_id))


def _draw(loss_mask: np.ndarray, tokens_per_anchor: float, words: np.random.Philox) -> np.ndarray:
    candidates = anchor_candidates(loss_mask)
    count = int(anchor_count(len(loss_mask), len(candidates), tokens_per_anchor))
    if count < len(candidates):  # the candidates with the `count` smallest random words are a uniform choice
        candidates = np.sort(candidates[np.argpartition(words.random_raw(len(candidates)), count)[:count]])
    return candidates.astype(np.int32)
