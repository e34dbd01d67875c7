"""Full batches from shuffled documents: first-fit over a look-ahead window.

The shuffle is cut into blocks of half the window. The documents of a block are taken in shuffle order, now one with more anchors per
token than usual, now one with fewer, so that every batch gets its share of draft rows; the last gap of a batch is closed with the
document of this or the next block that fits it. A block is used up before the next one is started, so every document's place is less than
`lookahead` away from its place in the shuffle, and a batch can hold any two documents.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

_TRIES = 12  # documents of about the right length that are compared for anchors
_TOLERANCE = 256  # a gap counts as closed when less than budget / this is left


def pack(lengths: np.ndarray, anchors: np.ndarray, budget: int, lookahead: int) -> tuple[np.ndarray, np.ndarray]:
    """Batches of at most `budget` tokens from documents in shuffle order.

    lengths, anchors: int64 [N], every length at most `budget`. Returns (int64 [N] places in the shuffle, batch after batch; int64 [B+1]
    offsets of the batches in it).
    """
    count, half = len(lengths), max(1, lookahead // 2)
    reserve, tolerance = int(lengths.mean()), budget // _TOLERANCE
    packed: list[int] = []
    offsets = [0]
    room, balance = budget, 0.0  # of the open batch: tokens left, anchors above its share
    window = np.empty(0, np.int64)  # places not used yet: the current block's, then the next one's
    for first in range(0, count, half):
        window = np.concatenate([window, np.arange(len(window) and first + half or first, min(first + 2 * half, count))])
        window = window[np.argsort(lengths[window], kind="stable")]
        share = anchors[window].sum() / lengths[window].sum()
        length, excess = lengths[window].tolist(), (anchors[window] - share * lengths[window]).tolist()
        used = bytearray(len(window))
        mine = np.argsort(window)[: np.count_nonzero(window < first + half)][::-1]
        above = [at for at in mine.tolist() if excess[at] > 0]
        below = [at for at in mine.tolist() if excess[at] <= 0]
        taken: list[int] = []
        while above or below:
            queue = below if not above or (below and balance > 0) else above
            at = queue[-1]
            if used[at]:
                queue.pop()
                continue
            if room - length[at] < reserve and room < budget:
                filler = _filler(room, balance, tolerance, length, excess, used)
                if filler >= 0:
                    at = filler
                elif length[at] > room:
                    offsets.append(len(packed) + len(taken))
                    room, balance = budget, 0.0
                    continue
            used[at] = 1
            taken.append(at)
            room -= length[at]
            balance += excess[at]
        packed += window[taken].tolist()
        window = window[np.frombuffer(used, np.uint8) == 0]
    offsets.append(count)
    return np.array(packed, np.int64), np.array(offsets, np.int64)


def _filler(room, balance, tolerance, length, excess, used) -> int:
    """The unused document that closes the gap `room` and evens out `balance` best, else the longest that fits, else -1."""
    best, distance, tries = -1, 0.0, 0
    for at in range(bisect_right(length, room) - 1, -1, -1):
        if used[at]:
            continue
        if best >= 0 and length[at] < room - tolerance:
            break
        off = abs(balance + excess[at])
        if best < 0 or off < distance:
            best, distance = at, off
        tries += 1
        if tries == _TRIES:
            break
    return best
