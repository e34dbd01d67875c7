"""What serving a drafter would gain on answers that are known already: block after block, each behind the token where the last one ended.

A server does not meet every position alike. It starts a block where the last one failed, so hard places begin more blocks than a uniform
choice of anchors does, and its tau is lower than the mean over such anchors. Where every candidate position is an anchor, one pass over the
documents tells what each of those blocks would have given, and the walk over them is the served one.
"""

from __future__ import annotations

import numpy as np

from dflash_ray.data.anchors import anchor_candidates
from dflash_ray.data.batches.batch import Batch

TOKENS, PASSES = "replay_tokens", "replay_passes"  # names of sums; their quotient is replay_tau


def replay(batch: Batch, matches: np.ndarray) -> dict[str, float]:
    """Tokens produced and passes made on all answers of a batch; `matches` int [A]: leading matches of each anchor's block.

    The first token of an answer comes from the prefill. Both are 0 unless every candidate position of the batch is an anchor.
    """
    bounds = batch.cu_seqlens.tolist()
    documents = [anchor_candidates(batch.loss_mask[low:high]) + low for low, high in zip(bounds[:-1], bounds[1:], strict=True)]
    if sum(map(len, documents)) != len(batch.anchors):
        return {TOKENS: 0.0, PASSES: 0.0}
    gain = np.zeros(bounds[-1] + 1, np.int64)
    gain[batch.anchors] = np.asarray(matches) + 1
    tokens = passes = 0
    for positions in documents:
        breaks = np.flatnonzero(np.diff(positions) > 1) + 1  # between two answers of one document
        for answer in np.split(positions, breaks):
            if not len(answer):
                continue
            at, last = int(answer[0]), int(answer[-1]) + 1  # the answer's first and last token
            tokens += last - at
            while at < last:
                at += int(gain[at])
                passes += 1
    return {TOKENS: float(tokens), PASSES: float(passes)}
