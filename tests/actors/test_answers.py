"""Waiting for an actor, without actors."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from actors.answers import ActorLost, answer


class Ref:
    """Like Ray's: awaited again and again, and a wait that is given up takes nothing away."""

    def __init__(self) -> None:
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def __await__(self):
        return asyncio.shield(self.future).__await__()


def test_an_answer_that_came_while_this_process_stood_still_counts():
    async def ask() -> Any:
        ref, loop = Ref(), asyncio.get_running_loop()
        waiting = asyncio.ensure_future(answer(ref, "target-0", "batch 1", 0.5))
        await asyncio.sleep(0)
        threading.Timer(0.2, lambda: loop.call_soon_threadsafe(ref.future.set_result, 7)).start()
        time.sleep(1.0)  # as after SIGSTOP: the limit and the answer are seen at once
        return await waiting

    assert asyncio.run(ask()) == 7


def test_no_answer_says_who_what_and_how_long():
    async def ask() -> Any:
        return await answer(Ref(), "target-0", "batch 1", 0.1)

    with pytest.raises(ActorLost, match="target-0 gave no answer to batch 1 within 0 s"):
        asyncio.run(ask())
