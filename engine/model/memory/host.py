"""Host memory of packed adapters and of saved KV pages, allocated once and reused, because fresh memory takes up to 2.5
ms per MB on a virtual machine. For a GPU it is pinned."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from threading import Lock
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.model.memory.allocation import CPU, free_host_bytes, zeros
from engine.sizing import GIB
from lora_kernels.pinned import PinningError, pinned_zeros

Longs = npt.NDArray[np.int64]
Fence = Callable[[], Callable[[], None]]
"""Returns a function that blocks until every copy begun so far is done."""


@dataclass(frozen=True, slots=True, eq=False)
class Blob:
    """A packed adapter in host memory: the given `pages` (int64 [num_pages]) of `memory` ([any number, page_elems]), in
    order."""

    memory: Tensor
    pages: Longs

    @classmethod
    def of(cls, memory: Tensor) -> Blob:
        """Return a packed adapter that consists of all of `memory` ([num_pages, page_elems]), in order."""
        return cls(memory, np.arange(len(memory)))

    @property
    def nbytes(self) -> int:
        return len(self.pages) * self.memory.shape[1] * self.memory.itemsize

    def contents(self) -> Tensor:
        """Return a copy of the packed adapter, [num_pages, page_elems]."""
        return self.memory[torch.from_numpy(self.pages)]

    def fill(self, contents: Tensor) -> None:
        """Overwrite the packed adapter's pages with `contents`, [num_pages, page_elems]."""
        self.memory[torch.from_numpy(self.pages)] = contents

    def places(self, offsets: Longs) -> Longs:
        """Map offsets of elements in the packed adapter to their offsets in `memory`, flattened."""
        pages, within = np.divmod(offsets, self.memory.shape[1])
        return self.pages[pages] * self.memory.shape[1] + within


class HostMemory(Protocol):
    """Protocol of an allocator of host memory for packed adapters (blobs). Thread-safe."""

    def take(self, num_pages: int) -> Blob:
        """Allocate host memory for a packed adapter: return a blob of `num_pages` pages of zeros."""

    def give(self, blob: Blob) -> None:
        """Free the host memory of a packed adapter, which the caller must not read or write any more."""


class PagedMemory:
    """A `HostMemory` that allocates packed adapters from `pages`, [num_pages, page_elems] zeros. `fence` is for a GPU,
    which may still copy from a freed blob; without it, the most recently freed pages are reused first."""

    def __init__(self, pages: Tensor, fence: Fence | None = None) -> None:
        self._pages = pages
        self._fence = fence
        self._free = list(range(len(pages) - 1, -1, -1))
        self._leaving: deque[tuple[Callable[[], None], list[int]]] = deque()
        self._lock = Lock()

    def take(self, num_pages: int) -> Blob:
        """Allocate host memory for a packed adapter: return a blob of zeros, and wait for copies from its pages if need
        be. Raises MemoryError if too few pages are free: callers reserve them first."""
        with self._lock:
            while num_pages > len(self._free) and self._leaving:
                wait, freed = self._leaving.popleft()
                wait()
                self._free += freed
            if num_pages > len(self._free):
                raise MemoryError(f"{num_pages} pages for an adapter, and {len(self._free)} are free in host memory")
            pages = sorted(self._free.pop() for _ in range(num_pages))
        for (run,) in runs(pages):
            self._pages[run].zero_()
        return Blob(self._pages, np.asarray(pages, dtype=np.int64))

    def give(self, blob: Blob) -> None:
        """Free the host memory of a packed adapter. Does not wait for copies from it, nor for a caller of `take` that
        does."""
        pages = blob.pages[::-1].tolist()
        if self._fence is not None:
            self._leaving.append((self._fence(), pages))
            return
        with self._lock:
            self._free += pages


def allocate_pages(
    adapter_gb: float, num_saved: int, page_elems: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the host memory, zeros, pinned for a GPU: pages of adapters, as many as fit into `adapter_gb` GiB, and of
    saved KV, [num_saved, page_elems]. Raises ValueError, which says what to do, if there is too little memory."""
    num_adapters = int(adapter_gb * GIB) // (page_elems * dtype.itemsize)
    count = (num_adapters + num_saved) * page_elems
    try:
        pages = _pinned(count, dtype) if device.type == "cuda" else zeros(count, dtype, CPU)
    except MemoryError as error:
        raise ValueError(f"the system gives no {adapter_gb:g} GiB for engine.host_adapter_gb; lower it") from error
    except PinningError as error:
        raise ValueError(f"{error}; lower engine.host_adapter_gb or engine.swap_gb") from error
    pages = pages.view(-1, page_elems)
    return pages[:num_adapters], pages[num_adapters:]


def _pinned(count: int, dtype: torch.dtype) -> Tensor:
    """Return [count] pinned zeros. Raises MemoryError if less memory is free, before the system would make room by
    ending a process."""
    if count * dtype.itemsize > free_host_bytes():
        raise MemoryError
    return pinned_zeros(count, dtype)


def runs(*lists: Longs | Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """Split equally long lists of page numbers into the longest runs in which every list counts up by one, so that one
    copy moves a whole run. Yield, for each run, the range of each list's numbers as a slice."""
    table = np.asarray(lists, dtype=np.int64)
    breaks = np.flatnonzero((np.diff(table) != 1).any(axis=0)) + 1
    for first, last in pairwise([0, *breaks.tolist(), table.shape[1]]):
        if first < last:
            yield tuple(slice(start, start + last - first) for start in table[:, first].tolist())
