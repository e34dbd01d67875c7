"""NVIDIA's management library, where there is one."""

from __future__ import annotations

from types import ModuleType


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
