"""Metrics to Weights & Biases or TensorBoard, from a thread of its own that can never stop or slow the run.

Records go into a bounded queue; a full queue drops the record, a failure is told once and ends the tracking, not the run. Without an
API key a W&B run is kept offline in the run folder, for `wandb sync`.
"""

from __future__ import annotations

import netrc
import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dflash_ray.config.schema import Config

QUEUE = 1000
LEAST_FREE = 2**20  # bytes; with less on its disk W&B loses records without saying so
CLOSE_SECONDS = 30.0

Write = Callable[[int, dict[str, float]], None]  # step, name -> number


class Tracker:
    """`tell(text)` is called, from the tracker's thread, with what the user should know."""

    def __init__(self, config: Config, folder: Path, tell: Callable[[str], None]):
        self._queue: queue.Queue[tuple[str, dict[str, Any]] | None] = queue.Queue(QUEUE)
        self._config, self._folder, self._tell = config, folder, tell
        self._full = False
        self._thread = threading.Thread(target=self._run, name="tracking", daemon=True)
        if config.tracking.kind != "none":
            self._thread.start()

    def log(self, prefix: str, record: dict[str, Any]) -> None:
        """Numbers of one step (`prefix` train or validation). Never blocks."""
        if self._thread.is_alive():
            try:
                self._queue.put_nowait((prefix, record))
            except queue.Full:
                if not self._full:
                    self._full = True
                    kind = self._config.tracking.kind
                    self._tell(f"{kind}: takes no more records; training goes on, and the run's own files have all of them")

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Lets the last records out, for at most `seconds`."""
        if self._thread.is_alive():
            try:
                self._queue.put_nowait(None)
            except queue.Full:
                return
            self._thread.join(seconds)

    def _run(self) -> None:
        kind = self._config.tracking.kind
        try:
            with (_wandb if kind == "wandb" else _tensorboard)(self._config, self._folder, self._tell) as write:
                while (item := self._queue.get()) is not None:
                    prefix, record = item
                    numbers = {key: value for key, value in record.items() if isinstance(value, int | float) and key != "step"}
                    write(record["step"], {f"{prefix}/{key}": value for key, value in numbers.items()})
        except Exception as error:  # whatever a tracking service does wrong must not end a run of days
            self._tell(f"{kind}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}; training goes on without it")


@contextmanager
def _wandb(config: Config, folder: Path, tell: Callable[[str], None]) -> Iterator[Write]:
    import wandb

    offline = not _has_key()
    if offline:
        tell(f"wandb: no API key, so metrics are kept offline in {folder / 'wandb'} (`wandb sync` sends them)")
    run = wandb.init(
        project=config.tracking.project,
        name=config.run.name,
        config=config.as_dict(),
        dir=str(folder),
        mode="offline" if offline else None,
        settings=wandb.Settings(silent=True, console="off"),
    )
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    disk_full = False

    def write(step: int, numbers: dict[str, float]) -> None:
        nonlocal disk_full
        if not disk_full and shutil.disk_usage(folder).free < LEAST_FREE:
            disk_full = True
            tell(f"wandb: the disk of {folder} is full, so its records are incomplete; training goes on")
        run.log(numbers | {"step": step})

    yield write
    run.finish()


def _has_key() -> bool:
    """In the environment, or in ~/.netrc for the server that wandb talks to."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(Path.home() / ".netrc").authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


@contextmanager
def _tensorboard(_config: Config, folder: Path, _tell: Callable[[str], None]) -> Iterator[Write]:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "tensorboard")) as writer:

        def write(step: int, numbers: dict[str, float]) -> None:
            for name, value in numbers.items():
                writer.add_scalar(name, value, step)
            writer.flush()

        yield write
