"""One numbered batch: what one target computes in one call and what the drafter consumes in one micro-step.

Always ragged: documents end to end, no padding inside. Whether the target runs it packed or builds a padded rectangle follows from
`layout`; features come back without padding, in document order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Batch:
    number: int  # 0, 1, 2, ... over the whole run; validation batches have numbers of their own
    epoch: int
    sample_ids: np.ndarray  # int64 [D]
    input_ids: np.ndarray  # int32 [T]
    cu_seqlens: np.ndarray  # int32 [D+1], first 0, last T
    loss_mask: np.ndarray  # uint8 [T], 1 = supervised
    anchors: np.ndarray  # int32 [A], positions in 0..T-1, ascending
    layout: str = "packed"  # packed | padded
    bucket: int = -1  # bucketed strategy: which bucket; else -1

    @property
    def tokens(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def documents(self) -> int:
        return int(self.sample_ids.shape[0])

    @property
    def lengths(self) -> np.ndarray:
        """int64 [D]: tokens of each document."""
        return np.diff(self.cu_seqlens.astype(np.int64))

    @property
    def allocated_tokens(self) -> int:
        """Tokens the target allocates: T packed, longest document x documents padded."""
        if self.layout == "packed" or self.documents == 0:
            return self.tokens
        return int(self.lengths.max()) * self.documents


@dataclass(frozen=True)
class BatchInfo:
    """What the coordinator knows of a batch whose tokens it never sees. Tokens, documents and anchors are counts."""

    number: int  # training batches and validation batches count apart
    epoch: int
    tokens: int
    allocated_tokens: int  # padding included
    documents: int
    supervised: int  # tokens
    anchors: int
    bucket: int  # -1 where the strategy has none
    sample_ids: list[int]

    @classmethod
    def of(cls, batch: Batch) -> BatchInfo:
        return cls(
            number=batch.number,
            epoch=batch.epoch,
            tokens=batch.tokens,
            allocated_tokens=batch.allocated_tokens,
            documents=batch.documents,
            supervised=int(batch.loss_mask.sum()),
            anchors=len(batch.anchors),
            bucket=batch.bucket,
            sample_ids=batch.sample_ids.tolist(),
        )
