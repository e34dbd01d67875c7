"""Tensors as they travel through the object store: one flat numpy view each, with shape and dtype beside it.

Ray moves numpy arrays without a copy; a torch tensor returned as it is would be pickled at a twentieth of the speed. What arrives is a
view of shared memory that other readers see too: it must never be written to. Drop it when the copy to the device is done, since a live
view pins the store.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import torch

# arrays out of the store are read-only; that a received tensor is never written to is our contract, stated above
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


@dataclass(frozen=True)
class Packed:
    data: np.ndarray  # uint8 [bytes]
    shape: tuple[int, ...]
    dtype: str  # name of a torch dtype


def pack(tensor: torch.Tensor) -> Packed:
    """`tensor` must lie on the CPU; no copy is made if it is contiguous. numpy knows no bfloat16, so bytes travel."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return Packed(flat.numpy(), tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def unpack(packed: Packed) -> torch.Tensor:
    """The tensor over the received bytes, zero-copy. Read-only by contract: torch does not enforce it."""
    dtype = getattr(torch, packed.dtype)
    if packed.data.size == 0:
        return torch.empty(packed.shape, dtype=dtype)
    return torch.from_numpy(packed.data).view(dtype).view(packed.shape)
