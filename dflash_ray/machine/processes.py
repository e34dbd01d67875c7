"""What a process does before its first tensor operation, and what it says about itself."""

from __future__ import annotations

import os
import socket
import sys
from typing import Any


def set_threads(count: int) -> None:
    """Results are bit for bit equal only at equal thread counts, and the OpenMP setting belongs to the calling thread: every thread
    that computes calls this first."""
    import torch

    torch.set_num_threads(count)


def facts() -> dict[str, Any]:
    """pid, node, CPU time, device, memory in bytes and watts of the device of this process. Loads no torch where nobody has."""
    with open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    out: dict[str, Any] = {"pid": os.getpid(), "node": socket.gethostname(), "rss_bytes": resident, "gpu": None, "gpu_bytes": 0}
    out["cpu_seconds"] = sum(os.times()[:2])
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        from dflash_ray.machine.nvml import device_watts

        out["gpu"] = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        out["gpu_bytes"] = torch.cuda.max_memory_allocated()
        out["device"], out["watts"] = device_watts() or (None, None)
    return out


def host_memory() -> tuple[int, int]:
    """(bytes that can still be had, all bytes) of this host."""
    with open("/proc/meminfo", encoding="ascii") as file:
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file}
    return sizes["MemAvailable"], sizes["MemTotal"]
