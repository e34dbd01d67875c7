"""The machine and the versions a run was made with, for the record."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections import Counter
from typing import Any

from dflash_ray.machine.nvml import nvml

PACKAGES = ("torch", "triton", "transformers", "flash-linear-attention", "ray", "numpy", "pyarrow", "safetensors", "wandb")


def environment() -> dict[str, Any]:
    """Plain values: Python, system, processors, memory in GiB, GPUs with driver, versions of packages (None: not installed)."""
    gpus, driver = _gpus()
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": _cpu(),
        "cpus": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": gpus,
        "driver": driver,
        "versions": {name: version(name) for name in PACKAGES},
    }


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), platform.machine())
    except OSError:
        return platform.machine()


def _gpus() -> tuple[list[str], str | None]:
    """Names with their number, and the driver's version; nothing where there is no NVIDIA driver."""
    library = nvml()
    if library is None:
        return [], None
    handles = [library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())]
    names = Counter(library.nvmlDeviceGetName(handle) for handle in handles)
    return [f"{count} x {name}" for name, count in names.items()], library.nvmlSystemGetDriverVersion()
