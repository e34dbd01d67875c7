"""What a process does before its first tensor operation, and what it says about itself."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch


def set_threads(count: int) -> None:
    """Results are bit for bit equal only at equal thread counts, and the OpenMP setting belongs to the calling thread: every thread
    that computes calls this first."""
    torch.set_num_threads(count)


def facts() -> dict[str, Any]:
    """pid, node, device and resident memory in bytes of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    out: dict[str, Any] = {"pid": os.getpid(), "node": socket.gethostname(), "rss_bytes": resident, "gpu": None, "gpu_bytes": 0}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        out["gpu"] = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        out["gpu_bytes"] = torch.cuda.max_memory_allocated()
    return out
