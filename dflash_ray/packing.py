"""Full batches from shuffled documents: first-fit over a look-ahead window.

The shuffle is cut into blocks of half the window. The documents of a block are taken in shuffle order, now one with more anchors per
token than the block, now one with fewer, so that every batch gets its share of draft rows; one that would leave too little room for a
usual document waits for the next batch, and the last gap is closed with the document of this or the next block that fits it. A block is
used up before the next one is started. So a document's place differs from its place in the uniform shuffle by less than `lookahead`
places, and that is all the bias there is: any two documents can meet, and no part of the epoch is made of longer documents than another.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

_TRIES = 12  # fitting documents that are compared for anchors
_TOLERANCE = 256  # a document fits if it leaves less than budget / this
_DEPTH = 8  # documents next in turn that are asked when the first is too long


def pack(lengths: np.ndarray, anchors: np.ndarray, budget: int, lookahead: int) -> tuple[np.ndarray, np.ndarray]:
    """Batches of at most `budget` tokens from documents in shuffle order.

    lengths, anchors: int64 [N], every length at most `budget`; lookahead: 2 or more. Returns (int64 [N] places in the shuffle, batch after
    batch; int64 [B+1] offsets of the batches in it).
    """
    count, half = len(lengths), lookahead // 2
    filling = _Filling(budget, usual=int(lengths.mean()))
    window = np.empty(0, np.int64)  # places not used yet, of the block in turn and the next one
    packed = []
    for first in range(0, count, half):
        ahead = np.arange(first + half if first else 0, min(first + 2 * half, count))
        window = np.concatenate([window, ahead])
        window = window[np.argsort(lengths[window], kind="stable")]
        in_turn = np.flatnonzero(window < first + half)
        if len(in_turn) == 0:
            continue
        in_turn = in_turn[np.argsort(-window[in_turn])]  # last first: they are popped from the end
        share = anchors[window[in_turn]].sum() / lengths[window[in_turn]].sum()
        excess = anchors[window] - share * lengths[window]
        above, below = in_turn[excess[in_turn] > 0], in_turn[excess[in_turn] <= 0]
        taken = filling.use_up(lengths[window].tolist(), excess.tolist(), above.tolist(), below.tolist())
        packed.append(window[taken])
        window = np.delete(window, taken)
    return np.concatenate(packed), np.array([*filling.offsets, count], np.int64)


class _Filling:
    """The open batch and the ends of the ones before it."""

    def __init__(self, budget: int, usual: int):
        self._budget, self._reserve, self._tolerance = budget, usual // 2, budget // _TOLERANCE
        self._ample = 2 * usual  # with more room than this left the gap is not closed yet
        self._room, self._balance = budget, 0.0  # tokens left; anchors above the batch's share
        self._placed = 0
        self.offsets = [0]

    def use_up(self, length: list[int], excess: list[float], above: list[int], below: list[int]) -> list[int]:
        """Places all documents of `above` and `below` (indices, last one first) and some others of the window; returns them in order.

        length, excess: of the window's documents, lengths ascending.
        """
        free = list(range(-1, len(length)))  # free[i + 1] == i: i is unused; else a step towards the longest unused one below i
        taken: list[int] = []
        room, balance = self._room, self._balance
        budget, reserve = self._budget, self._reserve
        while above or below:
            queue = below if not above or (below and balance > 0) else above
            at = queue.pop()
            if free[at + 1] != at:
                continue
            if room - length[at] < reserve and room < budget:
                queue.append(at)
                at = self._next_shorter(queue, room - reserve, length, free) if room > self._ample else -1
                if at < 0:
                    at = self._filler(room, balance, length, excess, free)
                if at < 0:
                    self.offsets.append(self._placed + len(taken))
                    room, balance = budget, 0.0
                    continue
            free[at + 1] = at - 1
            taken.append(at)
            room -= length[at]
            balance += excess[at]
        self._room, self._balance = room, balance
        self._placed += len(taken)
        return taken

    def _next_shorter(self, queue: list[int], limit: int, length: list[int], free: list[int]) -> int:
        """The first unused of the next few in turn that is no longer than `limit`, taken off the queue; -1 if there is none."""
        for back in range(len(queue) - 2, max(-1, len(queue) - 2 - _DEPTH), -1):
            at = queue[back]
            if length[at] <= limit and free[at + 1] == at:
                del queue[back]
                return at
        return -1

    def _filler(self, room: int, balance: float, length: list[int], excess: list[float], free: list[int]) -> int:
        """The unused document that fits `room` and evens out `balance` best; if none fits, the longest shorter one; if none, -1."""
        best, distance, tries = -1, 0.0, 0
        at = bisect_right(length, room) - 1
        while True:
            while free[at + 1] != at:
                step = free[free[at + 1] + 1]
                free[at + 1] = step
                at = step
            if at < 0 or (best >= 0 and (tries == _TRIES or length[at] < room - self._tolerance)):
                return best
            off = abs(balance + excess[at])
            if best < 0 or off < distance:
                best, distance = at, off
                if off < 1:  # anchor; closer than that no batch needs to be
                    return best
            tries += 1
            at -= 1
