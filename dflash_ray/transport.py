"""How features travel from a target to the drafter.

Two ways behind one interface. `object_store`: copied to pinned host memory, then through Ray's shared memory, then to the drafter's
device; works everywhere. `direct`: the features stay in a ring of buffers on the target's GPU, and the drafter, on the same host, copies
them from there by itself (one-sided: the target does nothing more). A message that finds no free buffer goes through the object store,
so the ring bounds memory and never blocks. Whatever dies, the batch is computed again.

A target calls `Sender.hold` where it computes and `Sender.take` in a thread of its own, so the copy of one batch runs under the
computation of the next. The drafter calls `Receiver.receive` in its staging thread; it returns when the features are its own, and the
sender's buffer may be released.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from dflash_ray.payload import Packed, pack, unpack


@dataclass(frozen=True)
class Remote:
    """A tensor in a buffer on another GPU of this host."""

    handle: tuple  # what opens the sender's buffer in another process
    slot: int
    shape: tuple[int, ...]
    dtype: str


Payload = dict[str, Packed | Remote]


class Sender:
    """`slots` buffers of `slot_bytes` on `device` for the direct way; 0 slots: everything goes through the object store."""

    def __init__(self, device: torch.device, slots: int = 0, slot_bytes: int = 0):
        self._held: dict[int, tuple[dict[str, torch.Tensor], torch.cuda.Event | None]] = {}
        self._slots: list[torch.Tensor] = []
        self._handles: list[tuple] = []
        self._free: list[int] = []
        self._lock = threading.Lock()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pinned: dict[int, torch.Tensor] = {}
        if slots:
            self._slots = [_shareable(slot_bytes, device) for _ in range(slots)]
            self._handles = [slot.untyped_storage()._share_cuda_() for slot in self._slots]
            self._free = list(range(slots))

    def hold(self, position: int, tensors: dict[str, torch.Tensor]) -> None:
        """Takes the results of a batch; returns at once."""
        ready = None
        if self._stream is not None:
            ready = torch.cuda.Event()
            ready.record()
        with self._lock:
            self._held[position] = (tensors, ready)

    def take(self, position: int) -> Payload:
        """The message of `position`, to be returned to the caller. KeyError if it is not held (any more)."""
        with self._lock:
            tensors, ready = self._held.pop(position)
            slot = self._free.pop() if self._fits(tensors) else None
        if self._stream is None:
            return {name: pack(tensor) for name, tensor in tensors.items()}
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            payload: Payload = {}
            for name, tensor in tensors.items():
                if name == "features" and slot is not None:
                    buffer = self._slots[slot][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                    buffer.copy_(tensor, non_blocking=True)
                    payload[name] = Remote(self._handles[slot], slot, tuple(tensor.shape), _name(tensor.dtype))
                else:
                    payload[name] = pack(self._to_host(tensor))
        self._stream.synchronize()
        return payload

    def release(self, slot: int) -> None:
        """The receiver has its copy."""
        with self._lock:
            self._free.append(slot)

    def _fits(self, tensors: dict[str, torch.Tensor]) -> bool:
        return bool(self._free) and tensors["features"].nbytes <= self._slots[0].nbytes

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Into pinned memory, reused by size class: page-locking is slow, so it is done once per size."""
        size = 1 << max(tensor.nbytes - 1, 1).bit_length()
        buffer = self._pinned.get(size)
        if buffer is None:
            buffer = self._pinned[size] = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        host = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        host.copy_(tensor, non_blocking=True)
        return host


class Receiver:
    """Features on the drafter's device, the receiver's own. Not for several threads."""

    def __init__(self, device: torch.device):
        self.device = device
        self._opened: dict[tuple, torch.UntypedStorage] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pinned: dict[str, torch.Tensor] = {}

    def receive(self, payload: Payload) -> tuple[dict[str, torch.Tensor], int | None]:
        """(tensors, the sender's slot to release or None). On a CPU the tensors are views of shared memory: read-only by contract."""
        if self._stream is None:
            return {name: unpack(packed) for name, packed in payload.items()}, None
        release = None
        tensors: dict[str, torch.Tensor] = {}
        with torch.cuda.stream(self._stream):
            for name, message in payload.items():
                if isinstance(message, Remote):
                    tensors[name] = self._copy_from_peer(message)
                    release = message.slot
                else:
                    tensors[name] = self._from_host(name, unpack(message))
        self._stream.synchronize()
        return tensors, release

    def _copy_from_peer(self, message: Remote) -> torch.Tensor:
        storage = self._opened.get(message.handle)
        if storage is None:
            storage = self._opened[message.handle] = torch.UntypedStorage._new_shared_cuda(*message.handle)
        dtype = getattr(torch, message.dtype)
        there = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        count = dtype.itemsize
        for size in message.shape:
            count *= size
        return there[:count].view(dtype).view(message.shape).to(self.device, copy=True)

    def _from_host(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.nbytes < 1 << 20:
            return tensor.to(self.device)
        buffer = self._pinned.get(name)
        if buffer is None or buffer.nbytes < tensor.nbytes:
            buffer = self._pinned[name] = torch.empty(1 << (tensor.nbytes - 1).bit_length(), dtype=torch.uint8, pin_memory=True)
        host = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        host.copy_(tensor)
        return host.to(self.device, non_blocking=True)


def _shareable(nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory that another process can open: outside expandable segments, whose handles do not travel."""
    torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
