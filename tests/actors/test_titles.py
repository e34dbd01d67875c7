"""Tests that kill an actor in a named phase find it by the title that Ray gives to its process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from actors.drafter import DrafterActor
from tests.support.faults import actors, doing
from tests.support.processes import end, wait_until

METHODS = DrafterActor.__ray_metadata__.modified_class  # so that a method renamed there fails here


@contextmanager
def process(title: str) -> Iterator[int]:
    """A process of this name that does nothing."""
    child = subprocess.Popen([title, "-c", "input()"], executable=sys.executable, stdin=subprocess.PIPE)
    try:
        wait_until(lambda: doing(child.pid) is not None, "its title", limit=30)
        yield child.pid
    finally:
        end(child)


def test_micro_steps_are_seen_one_by_one_and_in_groups():
    for method in (METHODS.train, METHODS.train_group):
        with process(f"ray::drafter:DrafterActor.{method.__name__}") as pid:
            assert actors(os.getpid(), "drafter", "train") == [pid], method.__name__
    with process(f"ray::DrafterActor.{METHODS.step.__name__}") as pid:
        assert actors(os.getpid(), "drafter", "train") == [] and actors(os.getpid(), "drafter", "step") == [pid]
    with process("ray::DrafterActor") as pid:
        assert actors(os.getpid(), "drafter", "") == [pid]
