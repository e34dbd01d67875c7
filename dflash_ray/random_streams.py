"""Named random streams: the same words for the same name and numbers, on every machine and with every numpy.

Only raw words of numpy's Philox generator are used: numpy keeps those the same in every version, which it does not promise for
`Generator.permutation` or `choice`. No stream has a state that outlives the call, so nothing of it goes into a checkpoint.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def stream(name: str, *numbers: int) -> np.random.Philox:
    """A generator named by a purpose and by non-negative numbers such as (seed, epoch, sample id)."""
    return np.random.Philox(np.random.SeedSequence([zlib.crc32(name.encode()), *numbers]))


def shuffled(count: int, words: np.random.Philox) -> np.ndarray:
    """int64 [count]: a uniform permutation of 0..count-1 (the order of that many 64-bit words)."""
    return np.argsort(words.random_raw(count), kind="stable")


def torch_generator(name: str, *numbers: int, device: torch.device | str = "cpu") -> torch.Generator:
    """The same named stream for torch's normal numbers, which are equal on one kind of device and differ between CPU and GPU."""
    import torch

    return torch.Generator(device).manual_seed(int(stream(name, *numbers).random_raw()) >> 1)
