"""Who computes which batch, and when: the bookkeeping of the batch order, without Ray, clock or thread.

A position of the order is in exactly one state: planned -> ready -> handed -> computing -> features -> staged -> done, or quarantined. Done
positions are those below `next`; the drafter consumes strictly in order. Two bounds hold at all times:

- prefetch: at most `prefetch` positions are ready or handed (their tokens are held);
- credit: a position starts computing only below `next + window`, and only while the bytes of everything computing, computed or staged
  stay within `window_bytes`, or nothing at all is in the window.

From every state the run can finish as long as one target works: the lowest waiting position always starts first, and where the very
next position does not fit, the features furthest ahead are given up and computed again later. The end
(`finished`) and "not yet" are two different things.

A parked target gets nothing until it wakes; one always works: where the last one at work is lost, a parked one wakes by itself.

A target slower than `slow_factor` times the median gets only positions so far ahead that it does not hold up the others (`slow`).
"""

from __future__ import annotations

import heapq
from collections import deque

from dflash_ray.pipeline.slow import position_for_slow, slow_targets
from dflash_ray.pipeline.states import COMPUTING, DONE, FEATURES, HANDED, PLANNED, QUARANTINED, READY, STAGED, TargetState, Window

MAX_STAGED = 2  # one in training, one copied while it trains


class Flow:
    def __init__(
        self,
        total: int,
        *,
        window: int,
        window_bytes: int,
        prefetch: int,
        queue_per_target: int = 1,
        slow_factor: float = 3.0,
        fetch_group: int = 1,
    ):
        assert total >= 0 and window >= 1 and 1 <= fetch_group <= prefetch and queue_per_target >= 0
        self.total, self.window = total, Window(window, window_bytes)
        self.prefetch, self.queue_per_target, self.slow_factor = prefetch, queue_per_target, slow_factor
        self.fetch_group = fetch_group  # new positions are asked for when there is room for so many, or for all that are left
        self.next = 0
        self.targets: dict[str, TargetState] = {}
        self.drafter_seconds: float | None = None
        self._state: dict[int, str] = {}
        self._bytes: dict[int, int] = {}
        self._tokens: dict[int, int] = {}
        self._owner: dict[int, str] = {}  # handed or computing -> target
        self._waiting: list[int] = []  # heap of ready and handed positions, may hold stale entries
        self._unhanded: list[int] = []  # heap of ready positions, may hold stale entries
        self._missing: list[int] = []  # heap of planned positions below the frontier (given up, rewound)
        self._dropped: list[int] = []  # positions whose tokens and features nobody needs any more, not yet told
        self._frontier = 0  # first position never asked for
        self._held = 0  # ready + handed + asked for
        self._asked: set[int] = set()
        self._free: dict[str, None] = {}  # targets that compute nothing, in order of becoming free
        self._slow: set[str] = set()

    # ---- what can be asked -------------------------------------------------------------------------------------------------

    def state(self, position: int) -> str:
        if position < self.next:
            return DONE
        return self._state.get(position, PLANNED)

    @property
    def finished(self) -> bool:
        return self.next >= self.total

    @property
    def ahead(self) -> int:
        """Batches whose tokens are held: ready or handed."""
        return self._held - len(self._asked)

    def queues(self) -> dict[str, int]:
        return {name: len(target.queue) for name, target in self.targets.items()}

    def features_waiting(self) -> int:
        return sum(1 for state in self._state.values() if state == FEATURES)

    # ---- batcher -----------------------------------------------------------------------------------------------------------

    def wanted(self) -> list[int]:
        """Positions whose tokens should be fetched now, lowest first; they count as asked for from here on."""
        out: list[int] = []
        if not self._missing and self.prefetch - self._held < min(self.fetch_group, self.total - self._frontier):
            return out
        while self._held < self.prefetch:
            position = self._pop_missing()
            if position is None:
                if self._frontier >= self.total:
                    break
                position, self._frontier = self._frontier, self._frontier + 1
            self._asked.add(position)
            self._held += 1
            out.append(position)
        while self._missing:  # the bound is full of later positions (after a rewind): the furthest ahead makes room for an earlier one
            position = self._pop_missing()
            held = max((p for p, s in self._state.items() if s in (READY, HANDED)), default=-1)
            if position is None or held < position:
                if position is not None:
                    heapq.heappush(self._missing, position)
                break
            self._unready(held)
            self._asked.add(position)
            self._held += 1
            out.append(position)
        return out

    def ready(self, position: int, nbytes: int, tokens: int = 1) -> bool:
        """The tokens of `position` are here; its features will take `nbytes`. False: nobody wants them any more."""
        if position not in self._asked:
            return False
        self._asked.discard(position)
        self._bytes[position], self._tokens[position] = nbytes, max(tokens, 1)
        self._state[position] = READY
        heapq.heappush(self._waiting, position)
        heapq.heappush(self._unhanded, position)
        return True

    # ---- targets -----------------------------------------------------------------------------------------------------------

    def add_target(self, name: str) -> None:
        assert name not in self.targets, name
        self.targets[name] = TargetState()
        self._free[name] = None

    def drain(self, name: str) -> bool:
        """No new batch for `name`. True: it computes nothing and is gone; else it goes when its batch is computed."""
        target = self.targets[name]
        target.draining = True
        self._give_back(target.queue)
        if target.computing is None:
            self._remove(name)
            return True
        self._keep_one_at_work()
        return False

    def lost(self, name: str) -> int | None:
        """`name` is dead or taken out: what it held goes back to the front. Returns the position it was computing."""
        target = self.targets[name]
        position = target.computing
        self._give_back(target.queue)
        if position is not None:
            self.window.leave(self._bytes[position])
            self._back_to_ready(position)
        self._remove(name)
        return position

    def park(self, name: str) -> bool:
        """`name` finishes what it computes and gets nothing more until it wakes. False: it is the only one at work and stays so."""
        target = self.targets[name]
        if not target.works or sum(one.works for one in self.targets.values()) == 1:
            return False
        target.parked = True
        self._give_back(target.queue)
        self._free.pop(name, None)
        self._find_slow()
        return True

    def wake(self, name: str) -> None:
        target = self.targets[name]
        target.parked = False
        if target.computing is None:
            self._free[name] = None
        self._find_slow()

    def parked(self) -> list[str]:
        return [name for name, target in self.targets.items() if target.parked]

    def assign(self) -> list[tuple[str, int]]:
        """(target, position) pairs that start computing now. Also hands batches to the queues of busy targets."""
        starts: list[tuple[str, int]] = []
        for name in list(self._free):
            target = self.targets[name]
            slow = name in self._slow
            position = self._position_for_slow(name) if slow else self._lowest()
            if position is None or not self._may_start(position):
                if slow:
                    continue
                break  # the lowest waiting position may not start, so nothing may
            self._take(position, name)
            target.computing = position
            self._state[position] = COMPUTING
            self._owner[position] = name
            self._held -= 1
            self.window.enter(self._bytes[position])
            del self._free[name]
            starts.append((name, position))
        self._fill_queues()
        return starts

    def computed(self, name: str, position: int, seconds: float) -> bool:
        """Features of `position` are there. True: `name` was draining and is gone now."""
        target = self.targets[name]
        assert target.computing == position, (name, target.computing, position)
        target.computing = None
        target.batches += 1
        target.took(seconds / self._tokens[position])
        self._find_slow()
        self._owner.pop(position)
        self._state[position] = FEATURES
        if target.draining:
            self._remove(name)
            return True
        if not target.parked:
            self._free[name] = None
        return False

    def failed(self, name: str, position: int) -> None:
        """`name` lives but could not compute `position`: it goes back to the front."""
        target = self.targets[name]
        assert target.computing == position
        target.computing = None
        self.window.leave(self._bytes[position])
        self._back_to_ready(position)
        if target.draining:
            self._remove(name)
        elif not target.parked:
            self._free[name] = None

    def tokens_lost(self, position: int) -> None:
        """The tokens of a waiting position are gone with a node: they are fetched again."""
        assert self.state(position) in (READY, HANDED), self.state(position)
        self._unready(position)

    def quarantine(self, position: int) -> None:
        """No target can compute `position`: it counts as empty."""
        state = self.state(position)
        assert state in (PLANNED, READY, HANDED), (position, state)
        if state in (READY, HANDED):
            self._unready(position)
        if position in self._asked:
            self._asked.discard(position)
            self._held -= 1
        self._state[position] = QUARANTINED

    # ---- drafter -----------------------------------------------------------------------------------------------------------

    def to_stage(self) -> int | None:
        """The next position to stage, in order, if its features are there and a place is free."""
        position, staged = self.next, 0
        while self._state.get(position) in (STAGED, QUARANTINED):
            staged += self._state[position] == STAGED
            position += 1
        return position if staged < MAX_STAGED and self._state.get(position) == FEATURES else None

    def staged(self, position: int) -> None:
        assert position == self.to_stage(), position
        self._state[position] = STAGED

    def done(self, position: int, seconds: float | None = None) -> None:
        """The drafter has finished `position` and dropped its features, or it was quarantined and its turn has come."""
        assert position == self.next and self.state(position) in (STAGED, QUARANTINED), (position, self.next, self.state(position))
        if self._state[position] == STAGED:
            self.window.leave(self._bytes[position])
        self._forget(position)
        self.next += 1
        if seconds is not None:
            self.drafter_seconds = seconds if self.drafter_seconds is None else 0.8 * self.drafter_seconds + 0.2 * seconds

    def unusable(self, position: int) -> None:
        """The features of `position` are lost or wrong: they are computed again."""
        assert self.state(position) in (FEATURES, STAGED)
        self._give_up(position)

    def rewind(self, position: int) -> None:
        """The order goes back to `position`: a drafter came back from its checkpoint."""
        assert position <= self.next
        staged = [p for p, s in self._state.items() if s == STAGED]
        for p in staged:
            self._give_up(p)  # their copies died with the drafter
        for p in range(position, self.next):
            heapq.heappush(self._missing, p)
        self.next = position

    def skip_to(self, position: int) -> None:
        """A run continues at `position`; only before anything was asked for."""
        assert self._frontier == self.next == 0 and not self._asked
        self.next = self._frontier = position

    def take_dropped(self) -> list[int]:
        """Positions planned again since the last call: whoever holds their tokens or features lets go of them."""
        dropped, self._dropped = self._dropped, []
        return dropped

    # ---- inside ------------------------------------------------------------------------------------------------------------

    def _lowest(self) -> int | None:
        while self._waiting and self._state.get(self._waiting[0]) not in (READY, HANDED):
            heapq.heappop(self._waiting)
        return self._waiting[0] if self._waiting else None

    def _may_start(self, position: int) -> bool:
        if position >= self.next + self.window.size:
            return False
        fits = self.window.fits(self._bytes[position])
        while not fits and position == self.next:
            ahead = [p for p, s in self._state.items() if s == FEATURES]
            if not ahead:
                return False
            self._give_up(max(ahead))
            fits = self.window.fits(self._bytes[position])
        return fits

    def _position_for_slow(self, name: str) -> int | None:
        limit = self.next + self.window.size
        waiting = (p for p, state in self._state.items() if state in (READY, HANDED) and p < limit)
        return position_for_slow(waiting, self._tokens, self.next, self.targets, self._slow, name, self.drafter_seconds)

    def _take(self, position: int, name: str) -> None:
        """`position` leaves the waiting ones for `name`; if another target had it handed, that one gets a batch of `name` instead."""
        own = self.targets[name].queue
        owner = self._owner.get(position)
        if owner is None or owner == name:
            if owner == name:
                own.remove(position)
            return
        other = self.targets[owner].queue
        other.remove(position)
        if own:
            swapped = own.popleft()
            other.append(swapped)
            self._owner[swapped] = owner

    def _fill_queues(self) -> None:
        if not self._unhanded:
            return
        for depth in range(self.queue_per_target):
            for name, target in self.targets.items():
                if len(target.queue) > depth or not target.works or name in self._slow:
                    continue
                while self._unhanded and self._state.get(self._unhanded[0]) != READY:
                    heapq.heappop(self._unhanded)
                if not self._unhanded:
                    return
                position = heapq.heappop(self._unhanded)
                self._state[position] = HANDED
                self._owner[position] = name
                target.queue.append(position)

    def _give_back(self, queue: deque[int]) -> None:
        while queue:
            position = queue.popleft()
            self._owner.pop(position)
            self._state[position] = READY
            heapq.heappush(self._unhanded, position)

    def _back_to_ready(self, position: int) -> None:
        self._owner.pop(position)
        self._state[position] = READY
        self._held += 1
        heapq.heappush(self._waiting, position)
        heapq.heappush(self._unhanded, position)

    def _unready(self, position: int) -> None:
        """A ready or handed position is planned again: its tokens are dropped."""
        owner = self._owner.pop(position, None)
        if owner is not None:
            self.targets[owner].queue.remove(position)
        self._held -= 1
        self._replan(position)

    def _give_up(self, position: int) -> None:
        self.window.leave(self._bytes[position])
        self._replan(position)

    def _replan(self, position: int) -> None:
        self._forget(position)
        self._dropped.append(position)
        heapq.heappush(self._missing, position)

    def _forget(self, position: int) -> None:
        for table in (self._state, self._bytes, self._tokens, self._owner):
            table.pop(position, None)

    def _pop_missing(self) -> int | None:
        while self._missing:
            position = heapq.heappop(self._missing)
            if position >= self.next and self.state(position) == PLANNED and position not in self._asked:
                return position
        return None

    def _find_slow(self) -> None:
        self._slow = slow_targets(self.targets, self.slow_factor)

    def _remove(self, name: str) -> None:
        self._free.pop(name, None)
        del self.targets[name]
        self._keep_one_at_work()
        self._find_slow()

    def _keep_one_at_work(self) -> None:
        stay = [name for name in self.parked() if not self.targets[name].draining]
        if stay and not any(one.works for one in self.targets.values()):
            self.wake(stay[0])
