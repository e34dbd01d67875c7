"""What a process does before its first tensor operation, and what it says about itself."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any

from dflash_ray.machine.nvml import device_watts


def set_threads(count: int) -> None:
    """Results are bit for bit equal only at equal thread counts, and the OpenMP setting belongs to the calling thread: every thread
    that computes calls this first."""
    import torch

    torch.set_num_threads(count)


@dataclass(frozen=True)
class Vitals:
    """How a process is: seconds of CPU time, bytes of memory, and the CUDA device it uses, if any."""

    pid: int
    node: str
    rss_bytes: int  # resident host memory
    cpu_seconds: float
    gpu: str | None = None  # CUDA_VISIBLE_DEVICES
    gpu_bytes: int = 0  # most that was allocated so far
    device: str | None = None  # UUID
    watts: float | None = None  # of the device
    kernels: dict[str, Any] | None = None  # of a target: what computes which part

    def as_dict(self) -> dict[str, Any]:
        """Plain values, without `device` and `kernels` where there are none."""
        return {name: value for name, value in asdict(self).items() if value is not None or name not in ("device", "kernels")}


def vitals(kernels: dict[str, Any] | None = None) -> Vitals:
    """Of this process. Loads no torch where nobody has."""
    with open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    mine = Vitals(os.getpid(), socket.gethostname(), resident, sum(os.times()[:2]), kernels=kernels)
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return mine
    device, watts = device_watts() or (None, None)
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return replace(mine, gpu=gpu, gpu_bytes=torch.cuda.max_memory_allocated(), device=device, watts=watts)


def host_memory() -> tuple[int, int]:
    """(bytes that can still be had, all bytes) of this host."""
    with open("/proc/meminfo", encoding="ascii") as file:
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file}
    return sizes["MemAvailable"], sizes["MemTotal"]
