"""Memory and energy of this machine while a benchmark runs."""

from __future__ import annotations

import os
import statistics
import threading
import time
from typing import Any

from dflash_ray.machine.nvml import nvml
from dflash_ray.machine.processes import host_memory

EVERY_SECONDS = 0.5


class Sampler:
    """A thread that looks twice a second at GPU memory and energy (NVML; nothing without a GPU), host memory and shared memory in use."""

    def __init__(self) -> None:
        self.samples: list[dict[str, Any]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._nvml = nvml()
        count = self._nvml.nvmlDeviceGetCount() if self._nvml else 0
        self._gpus = [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]

    def __enter__(self) -> Sampler:
        self.began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(EVERY_SECONDS):
            self.samples.append(self._look())

    def _look(self) -> dict[str, Any]:
        sample: dict[str, Any] = {"time": time.monotonic(), "host_bytes": _host_bytes(), "shm_bytes": _shm_bytes()}
        if self._gpus:
            sample["gpu_bytes"] = [self._nvml.nvmlDeviceGetMemoryInfo(gpu).used for gpu in self._gpus]
            sample["joules"] = sum(self._nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) for gpu in self._gpus) / 1e3
        return sample

    def summary(self, lines: list[dict[str, Any]]) -> dict[str, Any]:
        """Over the steps `lines` (of metrics.jsonl, the same clock) after their first tenth: growth is the median of the last quarter less
        that of the first one."""
        began = lines[max(1, len(lines) // 10) - 1]["time"]
        inside = [sample for sample in self.samples if began <= sample["time"] <= lines[-1]["time"]]
        if len(inside) < 8:
            return {}
        quarter = len(inside) // 4

        def growth(key: str, index: int | None = None) -> int:
            values = [sample[key] if index is None else sample[key][index] for sample in inside]
            return int(statistics.median(values[-quarter:]) - statistics.median(values[:quarter]))

        found: dict[str, Any] = {"host_growth_bytes": growth("host_bytes"), "shm_growth_bytes": growth("shm_bytes")}
        found["shm_most_bytes"] = max(sample["shm_bytes"] for sample in inside)
        if self._gpus:
            found["gpu_growth_bytes"] = [growth("gpu_bytes", index) for index in range(len(self._gpus))]
            found["gpu_most_bytes"] = [max(sample["gpu_bytes"][index] for sample in inside) for index in range(len(self._gpus))]
            joules, seconds = inside[-1]["joules"] - inside[0]["joules"], inside[-1]["time"] - inside[0]["time"]
            tokens = sum(line["real_tokens"] for line in lines if inside[0]["time"] < line["time"] <= inside[-1]["time"])
            found |= {"watts": joules / seconds, "tokens_per_joule": tokens / joules}
        return found


def _host_bytes() -> int:
    """In use on the machine: total less available."""
    available, total = host_memory()
    return total - available


def _shm_bytes() -> int:
    try:
        shm = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return (shm.f_blocks - shm.f_bfree) * shm.f_frsize
