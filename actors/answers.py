"""Waiting for an actor: its answer, its own exception, or the news that it is dead or hangs, told apart by the type that is raised."""

from __future__ import annotations

import asyncio
from typing import Any

import ray

# of an argument on its way to an actor that lives: its owner or the node that held it is gone
LOST = (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError, ray.exceptions.RaySystemError)
ARRIVED_LIMIT = 1.0  # seconds to read what has come


class ActorLost(Exception):
    """An actor died or did not answer in time; says which and what was waited for."""


class CouldNotStart(ActorLost):
    """An actor's constructor raised; the message is what it said."""

    def failure(self) -> Exception:
        """What ends a run whose actor cannot start at all: the user's mistake if the constructor called it one."""
        kind, _, text = str(self).partition(": ")
        return ValueError(text) if kind == "ValueError" else RunFailed(str(self))


class RunFailed(Exception):
    """The run cannot go on; the message is for the user."""


async def answer(ref: ray.ObjectRef, who: str, what: str, limit: float) -> Any:
    """The value of an actor call. ActorLost if `who` is dead or says nothing for `limit` seconds; its own exceptions pass through."""
    try:
        return await _await(ref, limit)
    except ray.exceptions.RayTaskError:
        raise  # from inside the actor, which lives, even if what it tells of is another one's death
    except ray.exceptions.ObjectLostError as error:
        raise ActorLost(f"{who}: the result of {what} is lost: {first_line(error)}") from None
    except ray.exceptions.RayError as error:
        if getattr(error, "actor_init_failed", False):
            raise CouldNotStart(str(error).strip().splitlines()[-1]) from None
        raise ActorLost(f"{who} died during {what}: {first_line(error)}") from None
    except TimeoutError:
        raise ActorLost(f"{who} gave no answer to {what} within {limit:.0f} s") from None


async def _await(ref: ray.ObjectRef, limit: float) -> Any:
    """`ref`'s value. TimeoutError after `limit` seconds, and a moment more: this process may itself have stood still meanwhile, and what
    has arrived by then counts."""
    try:
        async with asyncio.timeout(limit):
            return await ref
    except TimeoutError:
        async with asyncio.timeout(ARRIVED_LIMIT):
            return await ref


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def cause_of(error: ray.exceptions.RayTaskError) -> BaseException:
    """What was raised inside the actor, without Ray's wrapping."""
    return error.cause if isinstance(error.cause, BaseException) else error
