"""Numbers on their way from the device to the host.

`tensor.tolist()` waits for everything queued so far, and the device then idles until the host has queued more. `AsyncScalars` start on
their way when they are made and are waited for when the work behind them is queued; they wait for nothing but themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor


class AsyncScalars:
    """Copies `numbers` (any shape) to the host, behind what the current stream has to do."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers, self._arrived = numbers, None
        if numbers.is_cuda:
            # only into pinned memory is a copy not waited for
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True).copy_(numbers, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def wait(self) -> list[float] | float:
        """The numbers, as `tolist` gives them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._numbers.tolist()
