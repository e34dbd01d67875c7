"""From another shell to a running run: finds it, joins its Ray, and asks its coordinator.

Ray is imported only when the run's folder has said how to speak to it: how Ray authenticates is read when it is loaded.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dflash_ray.run.place import RunEnded, newest_run, run_place

JOIN_SECONDS = 60.0
ANSWER_SECONDS = 10.0


class LiveRun:
    """The run in `folder` (default: the newest). ValueError, one line, if there is none, it has ended, or Ray cannot be reached."""

    def __init__(self, folder: Path | None):
        self.place = run_place(folder.expanduser() if folder is not None else newest_run())
        address = self.place.info.ray_address
        if not self.place.reachable():
            raise self._problem(f"Ray at {address} cannot be reached; is this a node of the run's cluster?")
        if self.place.info.ray_auth_mode:
            os.environ.setdefault("RAY_AUTH_MODE", self.place.info.ray_auth_mode)
        self._join(address, self.place.info.namespace)

    def _join(self, address: str, namespace: str) -> None:
        with _one_line_or_nothing(f"Ray at {address} gave no answer within {JOIN_SECONDS:.0f} s"):
            import ray

            try:
                ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level="critical")
            except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
                why = str(error).strip().splitlines()[0] + self._other_auth()
                raise self._problem(f"Ray at {address} cannot be joined from here: {why}") from None
            try:
                self._coordinator = ray.get_actor(self.place.info.coordinator, namespace=namespace)
            except ValueError:
                raise self._problem(f"the run in {self.place.folder} is starting or has just ended; try again") from None

    def _problem(self, seen: str) -> ValueError:
        self.place = run_place(self.place.folder)
        return self.place.problem(seen)

    def _other_auth(self) -> str:
        theirs, ours = self.place.info.ray_auth_mode, os.environ.get("RAY_AUTH_MODE")
        return "" if theirs == ours else f" (RAY_AUTH_MODE is {ours or 'not set'} here, {theirs or 'not set'} in the run)"

    def ask(self, method: str, *arguments: Any) -> Any:
        """The coordinator's answer. ValueError if it is gone, says nothing, or refuses."""
        import ray

        from actors.answers import cause_of, first_line

        try:
            return ray.get(getattr(self._coordinator, method).remote(*arguments), timeout=ANSWER_SECONDS)
        except ray.exceptions.RayTaskError as error:
            cause = cause_of(error)
            raise (cause if isinstance(cause, ValueError) else ValueError(first_line(cause))) from None
        except ray.exceptions.RayActorError:
            raise RunEnded(str(self._problem(f"the run in {self.place.folder} has just ended"))) from None
        except ray.exceptions.GetTimeoutError:
            raise ValueError(
                f"the coordinator of the run in {self.place.folder} gave no answer within {ANSWER_SECONDS:.0f} s; what it was asked to "
                "change may still happen, see jobs.status"
            ) from None

    def __enter__(self) -> LiveRun:
        return self

    def __exit__(self, *_exc: Any) -> None:
        import ray

        ray.shutdown()


@contextmanager
def _one_line_or_nothing(overdue: str) -> Iterator[None]:
    """What Ray's native part writes on the way is kept from the terminal, and a join that hangs ends with the line `overdue`."""
    sys.stdout.flush(), sys.stderr.flush()
    saved = os.dup(2)

    def give_up() -> None:
        os.write(saved, f"error: {overdue}\n".encode())
        os._exit(2)

    timer = threading.Timer(JOIN_SECONDS, give_up)
    timer.daemon = True
    timer.start()
    try:
        with tempfile.TemporaryFile() as said:
            os.dup2(said.fileno(), 2)
            yield
    finally:
        timer.cancel()
        os.dup2(saved, 2)
        os.close(saved)
