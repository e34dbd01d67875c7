"""How features travel from a target to the drafter.

Two ways behind one interface. `object_store`: copied to pinned host memory, then through Ray's shared memory, then to the drafter's
device; works everywhere. `direct`: the features stay in a ring of buffers on the target's GPU, and the drafter, on the same host, copies
them from there by itself (one-sided: the target does nothing more). A message that finds no free buffer goes through the object store,
so the ring bounds memory and never blocks. Whatever dies, the batch is computed again; a checksum tells features from what is left of them.

A target calls `Sender.hold` where it computes and `Sender.take` in a thread of its own, so the copy of one batch runs under the
computation of the next. The drafter calls `Receiver.receive` in its staging thread; it returns when the features are its own, and
whoever passes the messages on may release the sender's buffer (`slot_of`).
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from dflash_ray.transport.payload import Packed, pack, unpack
from dflash_ray.transport.peer import Buffer, OpenedBuffer, PeerError, SharedBuffer, checksum

PROBE_BYTES = 256 << 20
COPY_THREADS = 4  # one core copies about 5 GB/s between pinned and shared memory


@dataclass(frozen=True)
class Remote:
    """A tensor in a buffer on another GPU of this host."""

    buffer: Buffer
    slot: int
    shape: tuple[int, ...]
    dtype: str
    checksum: int


Payload = dict[str, Packed | Remote]


def slot_of(payload: Payload) -> int | None:
    """The sender's buffer that the message lies in, if it lies in one."""
    features = payload["features"]
    return features.slot if isinstance(features, Remote) else None


class Sender:
    """Sends through the object store until `open_direct`."""

    def __init__(self, device: torch.device):
        self.device = device
        self._held: dict[int, tuple[dict[str, torch.Tensor], torch.cuda.Event | None]] = {}
        self._slots: dict[int, SharedBuffer] = {}
        self._free: list[int] = []
        self._direct = False
        self._lock = threading.Lock()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pinned: dict[tuple[str, int], torch.Tensor] = {}

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
            slot = self._free.pop() if self._fits(tensors["features"]) else None
        if self._stream is None:
            return {name: pack(tensor) for name, tensor in tensors.items()}
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            payload: Payload = {}
            for name, tensor in tensors.items():
                remote = name == "features" and slot is not None
                payload[name] = self._to_slot(slot, tensor) if remote else pack(self._to_host(name, tensor))
        self._stream.synchronize()
        return payload

    def drop(self, position: int) -> None:
        """Forgets what is held for `position`, if anything is."""
        with self._lock:
            self._held.pop(position, None)

    def release(self, slot: int) -> None:
        """The receiver has its copy."""
        with self._lock:
            if self._direct:
                self._free.append(slot)
            else:
                self._slots.pop(slot).free()

    # ---- the direct way ------------------------------------------------------------------------------------------------------

    def offer(self, slots: int, slot_bytes: int) -> Remote:
        """Allocates the ring and writes a pattern into its first buffer, for `Receiver.probe`. PeerError where buffers cannot be shared."""
        for slot in range(slots):  # one by one: if the memory ends here, `close_direct` gives back what was taken
            self._slots[slot] = SharedBuffer(max(slot_bytes, 4), self.device)
            self._free.append(slot)
        return self._to_slot(0, self._pattern())

    @property
    def buffers(self) -> list[Buffer]:
        return [slot.where for slot in self._slots.values()]

    def open_direct(self) -> None:
        self._direct = True

    def close_direct(self) -> None:
        """Everything through the object store from now on. A buffer whose message is on the way is freed with its release."""
        with self._lock:
            self._direct, free, self._free = False, self._free, []
            for slot in free:
                self._slots.pop(slot).free()

    def store_probe(self) -> Payload:
        """A message of the probe's size through the object store."""
        pattern = self._pattern()
        with torch.cuda.stream(self._stream):
            payload = {"features": pack(self._to_host("features", pattern))}
        self._stream.synchronize()
        return payload

    def _pattern(self) -> torch.Tensor:
        pattern = torch.arange(min(PROBE_BYTES, self._slots[0].nbytes) // 4, dtype=torch.int32, device=self.device)
        torch.cuda.current_stream(self.device).synchronize()  # written before another stream reads it
        return pattern

    def _fits(self, features: torch.Tensor) -> bool:
        return self._direct and bool(self._free) and 0 < features.nbytes <= self._slots[self._free[-1]].nbytes

    def _to_slot(self, slot: int, tensor: torch.Tensor) -> Remote:
        with torch.cuda.stream(self._stream):
            total = checksum(tensor)
            self._slots[slot].write(tensor, self._stream)
            return Remote(self._slots[slot].where, slot, tuple(tensor.shape), _name(tensor.dtype), int(total.item()))

    def _to_host(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Into pinned memory, reused by name and size class: page-locking is slow, so it is done once per size."""
        size = 1 << max(tensor.nbytes - 1, 1).bit_length()
        buffer = self._pinned.get((name, size))
        if buffer is None:
            buffer = self._pinned[name, size] = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        host = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        host.copy_(tensor, non_blocking=True)
        return host


class Receiver:
    """Features on the drafter's device, the receiver's own. Not for several threads."""

    def __init__(self, device: torch.device):
        self.device = device
        self._opened: dict[bytes, OpenedBuffer] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pinned: dict[str, torch.Tensor] = {}
        self._copiers = ThreadPoolExecutor(COPY_THREADS) if device.type == "cuda" else None

    def receive(self, payload: Payload) -> dict[str, torch.Tensor]:
        """The tensors of a message. On a CPU they are views of shared memory: read-only by contract.

        PeerError where the sender's buffer cannot be read or no longer holds what was sent.
        """
        if self._stream is None:
            return {name: unpack(packed) for name, packed in payload.items()}
        tensors: dict[str, torch.Tensor] = {}
        with torch.cuda.stream(self._stream):
            for name, message in payload.items():
                if isinstance(message, Remote):
                    tensors[name] = self._copy_from_peer(message)
                else:
                    tensors[name] = self._from_host(name, unpack(message))
        self._stream.synchronize()
        return tensors

    def probe(self, message: Remote) -> float:
        """Bytes per second of copying the sender's pattern. PeerError where the direct way does not work."""
        seconds = []
        for _ in range(3):  # the first one opens the buffer
            began = time.perf_counter()
            copied = self.receive({"features": message})
            seconds.append(time.perf_counter() - began)
        return copied["features"].nbytes / min(seconds)

    def forget(self, buffers: list[Buffer]) -> None:
        """Unmaps a sender's buffers: until then its GPU cannot have the memory back."""
        for buffer in buffers:
            opened = self._opened.pop(buffer.handle, None)
            if opened is not None:
                opened.close()

    def _copy_from_peer(self, message: Remote) -> torch.Tensor:
        opened = self._opened.get(message.buffer.handle)
        if opened is None:
            opened = self._opened[message.buffer.handle] = OpenedBuffer(message.buffer, self.device)
        out = torch.empty(message.shape, dtype=getattr(torch, message.dtype), device=self.device)
        opened.read(out, self._stream)
        if int(checksum(out).item()) != message.checksum:
            raise PeerError("the sender's buffer does not hold what was sent")
        return out

    def _from_host(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.nbytes < 1 << 20:
            return tensor.to(self.device)
        buffer = self._pinned.get(name)
        if buffer is None or buffer.nbytes < tensor.nbytes:
            buffer = self._pinned[name] = torch.empty(1 << (tensor.nbytes - 1).bit_length(), dtype=torch.uint8, pin_memory=True)
        host = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        out = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        # by parts: while one part goes to the device, the next ones are copied into pinned memory
        flat, there, source = (t.view(-1).view(torch.uint8) for t in (host, out, tensor))
        part = max(1 << 20, -(-tensor.nbytes // (4 * COPY_THREADS)))
        starts = range(0, tensor.nbytes, part)
        copies = [self._copiers.submit(flat[s : s + part].copy_, source[s : s + part]) for s in starts]
        for start, copied in zip(starts, copies, strict=True):
            copied.result()
            there[start : start + part].copy_(flat[start : start + part], non_blocking=True)
        return out


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
