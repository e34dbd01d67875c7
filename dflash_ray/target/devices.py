"""Which functions a target gets on a device: the one place that chooses.

Plain torch on a CPU, kernels on CUDA. On a CPU nothing of triton or flash-linear-attention is ever called, even where transformers has
bound it at import; the kernels are imported only here, and only for a CUDA device.
"""

from __future__ import annotations

import numpy as np
import torch

from dflash_ray.target.plain.fused import Fused, plain_fused
from dflash_ray.target.plain.mixers import DocumentBounds, Mixers, plain_mixers


def mixers_for(device: torch.device) -> Mixers:
    """What mixes tokens in the plain layers and in decoding."""
    if device.type == "cpu":
        return plain_mixers()
    if device.type == "cuda":
        from dflash_ray.target.kernels.mixers import kernel_mixers

        return kernel_mixers()
    raise ValueError(f"device {device}: targets run on cpu or cuda")


def fused_for(device: torch.device) -> Fused:
    """The steps between the matmuls of a packed pass."""
    if device.type != "cuda":
        return plain_fused()
    from dflash_ray.target.kernels.fused import kernel_fused

    return kernel_fused()


def bounds_for(bounds: np.ndarray, device: torch.device, *, delta: bool) -> DocumentBounds:
    """Documents of one packed pass at `bounds` int64 [D+1], with what the device's functions derive from them. `delta`: some layer is a
    gated delta net."""
    if device.type != "cuda":
        return DocumentBounds(torch.from_numpy(bounds.astype(np.int32)), tuple(np.diff(bounds).tolist()))
    from dflash_ray.target.kernels.mixers import kernel_bounds

    return kernel_bounds(bounds, device, delta=delta)
