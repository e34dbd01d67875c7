"""What a block may see, by position and never by block index.

A query in slot k of a block stands at position anchor + k of its document. It sees

- context: features of its own document strictly before its anchor, in a sliding layer those with `slot position - key position < W`;
- its own block: every slot in a full layer; in a sliding layer the slots up to its own, inside the same window.

It never sees another block or another document, however close the anchors stand (dflash.md, forward pass, 4).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash_ray.data.batches.batch import Batch

SLICE_ANCHORS = 64  # anchors of one document whose scores exist at one time: bounds memory, and lets early anchors skip later context


@dataclass(frozen=True)
class AnchorSlice:
    """Consecutive anchors of one document, as plain integers."""

    document: int
    first: int  # anchors first..last-1 of the batch
    last: int
    first_position: int  # of the first and of the last anchor, in the document
    last_position: int


@dataclass(frozen=True)
class Blocks:
    """Where the blocks of one batch stand. Indices count tokens of the batch, positions count tokens of a document."""

    block_size: int
    anchors: Tensor  # int64 [A] index of the anchor's token
    anchor_tokens: Tensor  # int64 [A] id of the anchor's token
    starts: Tensor  # int64 [A] index of the first token of the anchor's document
    ends: Tensor  # int64 [A] index after the last token of the anchor's document
    slot_positions: Tensor  # int64 [A, K]
    context_positions: Tensor  # int64 [T]
    documents: tuple[int, ...]  # lengths, D of them
    slices: tuple[AnchorSlice, ...]

    @classmethod
    def of(cls, batch: Batch, block_size: int, device: torch.device | str = "cpu") -> Blocks:
        """Blocks at `batch.anchors` (ascending) for documents at `batch.cu_seqlens`."""
        cu = batch.cu_seqlens.astype(np.int64)
        anchors = batch.anchors.astype(np.int64)
        owner = np.searchsorted(cu, anchors, side="right") - 1
        lengths = np.diff(cu)

        def tensor(array: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)

        return cls(
            block_size=block_size,
            anchors=tensor(anchors),
            anchor_tokens=tensor(batch.input_ids.astype(np.int64)[anchors]),
            starts=tensor(cu[owner]),
            ends=tensor(cu[owner + 1]),
            slot_positions=tensor((anchors - cu[owner])[:, None] + np.arange(block_size)),
            context_positions=tensor(np.arange(cu[-1]) - np.repeat(cu[:-1], lengths)),
            documents=tuple(lengths.tolist()),
            slices=_slices(cu, anchors, owner),
        )


def _slices(cu: np.ndarray, anchors: np.ndarray, owner: np.ndarray) -> tuple[AnchorSlice, ...]:
    slices = []
    bounds = np.searchsorted(owner, np.arange(len(cu)))  # anchors of document d are bounds[d]..bounds[d+1]
    for document, (first, last) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        for begin in range(int(first), int(last), SLICE_ANCHORS):
            end = min(begin + SLICE_ANCHORS, int(last))
            start = int(cu[document])
            slices.append(AnchorSlice(document, begin, end, int(anchors[begin]) - start, int(anchors[end - 1]) - start))
    return tuple(slices)


def sees_context(anchor: Tensor, slot: Tensor, key: Tensor, window: int | None) -> Tensor:
    """bool, broadcast: may a slot of the block at `anchor` see the context at `key`? All are positions of the same document."""
    before = key < anchor
    return before if window is None else before & (slot - key < window)


def sees_slot(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """bool, broadcast: may slot `query` see slot `key` of its own block?"""
    return torch.ones_like(query - key, dtype=torch.bool) if window is None else (key <= query) & (query - key < window)
