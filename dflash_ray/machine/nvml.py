"""NVIDIA's management library, where there is one, and the watts of this process's GPU."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any


def nvml() -> ModuleType | None:
    """The library, initialised; None without the package, the driver or the right to ask it."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def device_watts() -> tuple[str, float] | None:
    """(UUID, watts) of this process's CUDA device by NVML; None where NVML is missing or the device does not tell (MIG)."""
    import pynvml

    try:
        uuid, handle = _device()
        return uuid, pynvml.nvmlDeviceGetPowerUsage(handle) / 1000
    except pynvml.NVMLError:
        return None


@cache
def _device() -> tuple[str, Any]:
    """(UUID, NVML's handle): a process sees one GPU, the first."""
    import pynvml
    import torch

    pynvml.nvmlInit()
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    return uuid, pynvml.nvmlDeviceGetHandleByUUID(uuid)
