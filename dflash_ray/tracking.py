"""Metrics to Weights & Biases, from a thread of its own that can never stop or slow the run.

Records go into a bounded queue; a full queue drops the record, a failure is told once and ends the tracking, not the run. Without an
API key the run is kept offline in the run folder, for `wandb sync`.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_ray.config import Config

QUEUE = 1000
CLOSE_SECONDS = 30.0


class Tracker:
    """`tell(text)` is called, from the tracker's thread, with what the user should know."""

    def __init__(self, config: Config, folder: Path, tell: Callable[[str], None]):
        self._queue: queue.Queue[tuple[str, dict[str, Any]] | None] = queue.Queue(QUEUE)
        self._config, self._folder, self._tell = config, folder, tell
        self._thread = threading.Thread(target=self._run, name="tracking", daemon=True)
        if config.tracking.kind != "none":
            self._thread.start()

    def log(self, prefix: str, record: dict[str, Any]) -> None:
        """Numbers of one step (`prefix` train or validation). Never blocks."""
        if self._thread.is_alive():
            try:
                self._queue.put_nowait((prefix, record))
            except queue.Full:
                pass  # the tracker hangs; the run's own files have every record

    def close(self) -> None:
        """Lets the last records out, for at most half a minute."""
        if self._thread.is_alive():
            try:
                self._queue.put_nowait(None)
            except queue.Full:
                return
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            import wandb

            offline = not os.environ.get("WANDB_API_KEY") and not (Path.home() / ".netrc").exists()
            if offline:
                self._tell(f"wandb: no API key, so metrics are kept offline in {self._folder / 'wandb'} (`wandb sync` sends them)")
            run = wandb.init(
                project=self._config.tracking.project,
                name=self._config.run.name,
                config=self._config.as_dict(),
                dir=str(self._folder),
                mode="offline" if offline else "online",
                settings=wandb.Settings(silent=True, console="off"),
            )
            run.define_metric("step")
            run.define_metric("*", step_metric="step")
            while (item := self._queue.get()) is not None:
                prefix, record = item
                numbers = {key: value for key, value in record.items() if isinstance(value, int | float) and key != "step"}
                run.log({f"{prefix}/{key}": value for key, value in numbers.items()} | {"step": record["step"]})
            run.finish()
        except Exception as error:  # whatever a tracking service does wrong must not end a run of days
            self._tell(f"wandb: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}; training goes on without it")
