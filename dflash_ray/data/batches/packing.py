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

_TRIES = 6  # fitting documents that are compared for anchors
_TOLERANCE = 256  # a document fits if it leaves less than budget / this
_DEPTH = 8  # documents next in turn that are asked when the first is too long
_PARTS = 16  # of an anchor; whole numbers are faster to hand to Python than fractions, and the same everywhere
_INDEX_BITS = 32


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
        window = window[_order_of(lengths[window])]
        length = lengths[window]
        in_turn = np.flatnonzero(window < first + half)
        if len(in_turn) == 0:
            continue
        in_turn = in_turn[_order_of(window[in_turn])][::-1]  # last first: they are popped from the end
        share = anchors[window[in_turn]].sum() / length[in_turn].sum()
        excess = np.rint(_PARTS * (anchors[window] - share * length)).astype(np.int64)
        above = excess[in_turn] > 0
        taken = np.array(filling.use_up(length.tolist(), excess.tolist(), in_turn[above].tolist(), in_turn[~above].tolist()))
        packed.append(window[taken])
        unused = np.ones(len(window), bool)
        unused[taken] = False
        window = window[unused]
    return np.concatenate(packed), np.array([*filling.offsets, count], np.int64)


def _order_of(keys: np.ndarray) -> np.ndarray:
    """A stable argsort of int64 keys from 0 below 2^31, in a third of numpy's time."""
    return np.sort(keys << _INDEX_BITS | np.arange(len(keys))) & ((1 << _INDEX_BITS) - 1)


class _Filling:
    """The open batch and the ends of the ones before it."""

    def __init__(self, budget: int, usual: int):
        self._budget, self._reserve, self._tolerance = budget, usual // 2, budget // _TOLERANCE
        self._ample = 2 * usual  # with more room than this left the gap is not closed yet
        self._room, self._balance = budget, 0  # tokens left; parts of anchors above the batch's share
        self._placed = 0
        self.offsets = [0]

    def use_up(self, length: list[int], excess: list[int], above: list[int], below: list[int]) -> list[int]:
        """Places all documents of `above` and `below` (indices, last one first) and some others of the window; returns them in the order of
        the batches.

        length, excess: of the window's documents, lengths ascending.
        """
        free = list(range(-1, len(length)))  # free[i + 1] == i: i is unused; else a step towards the longest unused one below i
        taken: list[int] = []
        room, balance = self._room, self._balance
        budget, reserve, ample, shortest = self._budget, self._reserve, self._ample, length[0]
        while above or below:
            queue = below if not above or (balance > 0 and below) else above
            at = queue.pop()
            if free[at + 1] != at:
                continue
            if room - length[at] < reserve and room < budget:
                queue.append(at)
                at = self._next_shorter(queue, room - reserve, length, free) if room > ample else -1
                if at < 0 and room >= shortest:
                    at = self._filler(room, balance, length, excess, free)
                if at < 0:
                    self.offsets.append(self._placed + len(taken))
                    room, balance = budget, 0
                    continue
            free[at + 1] = at - 1
            taken.append(at)
            room -= length[at]
            balance += excess[at]
        self._room, self._balance = room, balance
        self._placed += len(taken)
        return taken

    def _next_shorter(self, queue: list[int], limit: int, length: list[int], free: list[int]) -> int:
        """The first unused of the next few in turn that is no longer than `limit`; -1 if there is none."""
        for at in queue[-2 : -2 - _DEPTH : -1]:
            if length[at] <= limit and free[at + 1] == at:
                return at
        return -1

    def _filler(self, room: int, balance: int, length: list[int], excess: list[int], free: list[int]) -> int:
        """The unused document that fits `room` and evens out `balance` best; if none fits, the longest shorter one; if none, -1."""
        best, distance, tries = -1, 0, 0
        enough = room - self._tolerance
        at = bisect_right(length, room) - 1
        while True:
            while free[at + 1] != at:
                step = free[free[at + 1] + 1]
                free[at + 1] = step
                at = step
            if at < 0 or (best >= 0 and (tries == _TRIES or length[at] < enough)):
                return best
            off = abs(balance + excess[at])
            if best < 0 or off < distance:
                best, distance = at, off
                if off < _PARTS:  # closer than an anchor no batch needs to be
                    return best
            tries += 1
            at -= 1
