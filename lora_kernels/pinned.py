"""Pinned host memory, registered with the driver as it is (cudaHostRegister) before the first step, because torch
rounds allocations up to powers of two and may stop the device. A step's arrays pass through a ring of it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from functools import cache
from threading import Lock
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

SYSTEM_PAGE = os.sysconf("SC_PAGE_SIZE")
SPAN = 64
"""Alignment of arrays in a segment of an upload ring, in bytes."""
SEGMENTS, SEGMENT_BYTES = 8, 1 << 20
"""Size of an upload ring. The input of a step of 256 rows with contexts of 8k takes half a segment, and at most two
steps are under way."""


class PinningError(ValueError):
    """The CUDA driver does not register host memory; the message says why."""


class Mark(Protocol):
    """A point in the order of a stream's work, for example a CUDA event."""

    def synchronize(self) -> None:
        """Block until the work before this point is done."""


def pinned_zeros(count: int, dtype: torch.dtype) -> Tensor:
    """Return [count] zeros in host memory of exactly that size, registered with the CUDA driver until the tensor and
    all its views are gone. Raises PinningError if the driver refuses, MemoryError if the system has too little
    memory."""
    num_bytes = count * dtype.itemsize
    # The driver pins whole system pages, so that two registrations must not share one.
    raw = np.zeros(-(-num_bytes // SYSTEM_PAGE) * SYSTEM_PAGE + SYSTEM_PAGE, dtype=np.uint8)
    start = -raw.ctypes.data % SYSTEM_PAGE
    if num_bytes:
        _register(raw, raw.ctypes.data + start, num_bytes)
    return torch.from_numpy(raw)[start : start + num_bytes].view(dtype)


def _register(owner: npt.NDArray[np.uint8], address: int, num_bytes: int) -> None:
    """Register memory of `owner`, and have it unregistered when `owner` is freed. Raises PinningError."""
    driver = torch.cuda.cudart()
    # Without flags, memory is also mapped for devices with unified addressing, whose kernels may then store there.
    code = driver.cudaHostRegister(address, num_bytes, 0)
    if int(code):
        raise PinningError(
            f"the CUDA driver does not pin {num_bytes / 2**20:.1f} MiB of host memory: "
            f"{driver.cudaGetErrorString(code)}; this process may lock {_lock_limit()}"
        )
    # Not at exit: the driver frees everything then, and may already be gone.
    weakref.finalize(owner, driver.cudaHostUnregister, address).atexit = False


def _lock_limit() -> str:
    """Return, in words, how much memory this process may lock (RLIMIT_MEMLOCK; `ulimit -l`)."""
    from resource import RLIM_INFINITY, RLIMIT_MEMLOCK, getrlimit  # Unix only

    limit = getrlimit(RLIMIT_MEMLOCK)[0]
    return "any amount (ulimit -l)" if limit == RLIM_INFINITY else f"{limit / 2**20:.1f} MiB (ulimit -l)"


class HostBlock:
    """int32 numbers on the host that are filled and then copied to a device at once, step after step: pinned if the
    device is a GPU."""

    def __init__(self, size: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.numbers = pinned_zeros(size, torch.int32) if on_gpu else torch.zeros(size, dtype=torch.int32)
        self._sent = torch.cuda.Event() if on_gpu else None

    def wait(self) -> None:
        """Block until the last `send` has been copied: from then on, the block may be filled again."""
        if self._sent is not None:
            self._sent.synchronize()

    def send(self, target: Tensor, count: int) -> None:
        """Start to copy the first `count` numbers to `target` on the device. Does not wait for a GPU."""
        target[:count].copy_(self.numbers[:count], non_blocking=True)
        if self._sent is not None:
            self._sent.record()


class UploadRing:
    """Uploads arrays to `device` on the current stream, always the same one, through `memory`, uint8 [segments, bytes],
    that is used again: the host waits only for copies of a whole round earlier. Thread-safe."""

    def __init__(self, memory: Tensor, device: torch.device, mark: Callable[[], Mark]) -> None:
        self._segments = [(segment, segment.numpy()) for segment in memory]
        self._size = memory.shape[1]
        self._device = device
        self._mark = mark
        self._marks: list[Mark | None] = [None] * len(memory)
        self._current, self._used = 0, 0
        self._lock = Lock()

    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        """Return an array as a tensor on the device. Does not wait for the copy; the array may be changed at once."""
        dtype = torch.from_numpy(array[:0]).dtype
        target = torch.empty(array.shape, dtype=dtype, device=self._device)
        self.copy(target, array)
        return target

    def copy(self, target: Tensor, array: npt.NDArray[Any]) -> None:
        """Start to copy an array to `target`, a contiguous tensor of its size and dtype on the device, in pieces if it
        is larger than a segment. The array may be changed at once."""
        source, flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8), target.view(-1).view(torch.uint8)
        with self._lock:
            for start in range(0, len(source), self._size):
                self._send(flat[start : start + self._size], source[start : start + self._size])

    def _send(self, target: Tensor, piece: npt.NDArray[np.uint8]) -> None:
        if self._used + len(piece) > self._size:
            self._turn()
        start = self._used
        self._used += -(-len(piece) // SPAN) * SPAN
        segment, view = self._segments[self._current]
        view[start : start + len(piece)] = piece
        target.copy_(segment[start : start + len(piece)], non_blocking=True)

    def _turn(self) -> None:
        """Go on to the next segment, once the copies from it are done."""
        self._marks[self._current] = self._mark()
        self._current, self._used = (self._current + 1) % len(self._segments), 0
        mark = self._marks[self._current]
        if mark is not None:
            mark.synchronize()


def upload_ring(device: torch.device) -> UploadRing | None:
    """Return the ring for uploads to a GPU, which the process has once for each, or None for the host. Raises
    PinningError if the first call cannot allocate it."""
    if device.type != "cuda":
        return None
    return _cuda_ring(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _cuda_ring(index: int) -> UploadRing:
    memory = pinned_zeros(SEGMENTS * SEGMENT_BYTES, torch.uint8).view(SEGMENTS, SEGMENT_BYTES)

    def mark() -> Mark:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(index))
        return event

    return UploadRing(memory, torch.device("cuda", index), mark)


def upload(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Return an array as a tensor on the device. On a GPU it is copied in stream order, and the host does not wait; on
    a CPU the tensor shares the array's memory."""
    ring = upload_ring(device)
    return torch.from_numpy(array) if ring is None else ring.upload(array)


def upload_into(target: Tensor, array: npt.NDArray[Any]) -> None:
    """Copy an array to `target`, a contiguous tensor of its size and dtype: on a GPU in stream order, and the host does
    not wait."""
    ring = upload_ring(target.device)
    if ring is None:
        target.copy_(torch.from_numpy(array))
    else:
        ring.copy(target, array)
