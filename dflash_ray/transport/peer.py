"""One-sided copies between GPUs of one host: a buffer here is read by another process, and this one does nothing more.

Buffers come straight from the driver (`cuMemAlloc`), outside torch's allocator: the handles of its expandable segments do not travel,
and a buffer that another process maps must never be reused for something else. The reader opens a handle with its own GPU current, so
that no context of the reader appears on the writer's GPU. It must see the writer's GPU (`see_all_gpus`).

Source of the calls: CUDA driver API, "Memory Management" (cuIpcGetMemHandle, cuIpcOpenMemHandle, cuMemcpyAsync).
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

_LAZY_ENABLE_PEER_ACCESS = 1
_HANDLE_BYTES = 64
_MOST_GPUS = 64  # of one host; the list of visible GPUs ends at the first that does not exist


class PeerError(RuntimeError):
    """The driver refused; says what was asked of it."""


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * _HANDLE_BYTES)]


@dataclass(frozen=True)
class Buffer:
    """Where a buffer lies, for other processes of the same host."""

    host: str  # boot id: the same on one machine, containers included
    gpu: str  # uuid
    handle: bytes
    nbytes: int


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise PeerError(f"no CUDA driver: {error}") from None


def _call(name: str, *arguments: object) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code != 0:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise PeerError(f"{name}: {(text.value or str(code).encode()).decode()}")


def host_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename


def gpu_id(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def see_all_gpus() -> None:
    """Makes every GPU of the host visible to this process, its own one staying first and therefore the default. Call before CUDA starts."""
    own = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not own.isdigit() or torch.cuda.is_initialized():
        return  # none, several, or named by uuid: left as it is, and the direct way is then found not to work
    others = [str(index) for index in range(_MOST_GPUS) if str(index) != own]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join([own, *others])


class SharedBuffer:
    """`nbytes` of memory on `device` that other processes may read."""

    def __init__(self, nbytes: int, device: torch.device):
        self.nbytes, self.device = nbytes, device
        pointer, handle = ctypes.c_uint64(), _Handle()
        with torch.cuda.device(device):
            torch.cuda.current_stream(device).synchronize()  # a context is there from now on
            _call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(nbytes))
            try:
                _call("cuIpcGetMemHandle", ctypes.byref(handle), pointer)
            except PeerError:
                _call("cuMemFree_v2", pointer)
                raise
        self.pointer = pointer.value
        self.where = Buffer(host_id(), gpu_id(device), ctypes.string_at(ctypes.byref(handle), _HANDLE_BYTES), nbytes)

    def write(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Copies a contiguous `tensor` of the same device to the front of the buffer, on `stream`."""
        assert tensor.is_contiguous() and tensor.nbytes <= self.nbytes
        copy(self.pointer, tensor.data_ptr(), tensor.nbytes, stream)

    def free(self) -> None:
        if self.pointer:
            with torch.cuda.device(self.device):
                _call("cuMemFree_v2", ctypes.c_uint64(self.pointer))
            self.pointer = 0


class OpenedBuffer:
    """Another process's buffer, mapped for `device`. PeerError if it is on another host, its GPU cannot be reached, or it is gone."""

    def __init__(self, where: Buffer, device: torch.device):
        if where.host != host_id():
            raise PeerError("the sender is on another host")
        self.where, self.device = where, device
        pointer, handle = ctypes.c_uint64(), _Handle.from_buffer_copy(where.handle)
        with torch.cuda.device(device):
            torch.cuda.current_stream(device).synchronize()
            open_handle = _driver().cuIpcOpenMemHandle_v2
            open_handle.argtypes = [ctypes.POINTER(ctypes.c_uint64), _Handle, ctypes.c_uint]
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), handle, _LAZY_ENABLE_PEER_ACCESS)
        self.pointer = pointer.value

    def read(self, out: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Copies the front of the buffer into a contiguous `out`, on `stream` of the reader's device."""
        assert out.is_contiguous() and out.nbytes <= self.where.nbytes
        copy(out.data_ptr(), self.pointer, out.nbytes, stream)

    def close(self) -> None:
        if self.pointer:
            with torch.cuda.device(self.device):
                _call("cuIpcCloseMemHandle", ctypes.c_uint64(self.pointer))
            self.pointer = 0


def copy(to: int, source: int, nbytes: int, stream: torch.cuda.Stream) -> None:
    with torch.cuda.device(stream.device):
        _call(
            "cuMemcpyAsync",
            ctypes.c_uint64(to),
            ctypes.c_uint64(source),
            ctypes.c_size_t(nbytes),
            ctypes.c_void_p(stream.cuda_stream),
        )


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """int64 scalar on the tensor's device: the sum of its 32-bit words (bytes where they do not divide), wrapping."""
    flat = tensor.view(-1).view(torch.uint8)
    words = flat.view(torch.int32) if flat.numel() % 4 == 0 and flat.storage_offset() % 4 == 0 else flat
    return words.sum(dtype=torch.int64)
