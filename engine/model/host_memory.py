"""Host memory of packed adapters, and its reuse.

On a CPU the adapters share one arena of pages, and freed pages are reused: memory fresh from the system is cleared
first, and on a virtual machine whose host reclaims free pages it also has to be found again. Measured on such a
machine: up to 2.5 ms per MB, half of the time of a fetch, while concurrent steps waited for their core.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from threading import Lock
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.model.memory import CPU, GIB, zeros

Longs = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Blob:
    """A packed adapter: the given `pages` (int64 [num_pages]) of `memory` ([any number, page_elems]), in order."""

    memory: Tensor
    pages: Longs

    @classmethod
    def of(cls, memory: Tensor) -> Blob:
        """Returns a blob of all of `memory` ([num_pages, page_elems])."""
        return cls(memory, np.arange(len(memory)))

    @property
    def nbytes(self) -> int:
        return len(self.pages) * self.memory.shape[1] * self.memory.itemsize

    def contents(self) -> Tensor:
        """Returns a copy of the blob, [num_pages, page_elems]."""
        return self.memory[torch.from_numpy(self.pages)]

    def fill(self, contents: Tensor) -> None:
        """Overwrites the blob with `contents`, [num_pages, page_elems]."""
        self.memory[torch.from_numpy(self.pages)] = contents

    def places(self, offsets: Longs) -> Longs:
        """Maps offsets of elements in the blob to their offsets in `memory`, flattened."""
        pages, within = np.divmod(offsets, self.memory.shape[1])
        return self.pages[pages] * self.memory.shape[1] + within


class HostMemory(Protocol):
    """Allocates and frees the host memory of blobs. Thread-safe."""

    def take(self, num_pages: int) -> Blob:
        """Allocates and returns a blob of `num_pages` pages of zeros."""

    def give(self, blob: Blob) -> None:
        """Frees a blob, which the caller must not read or write any more."""


class PagedMemory:
    """A `HostMemory` for a CPU, in pages of one arena. The most recently freed pages are reused first, so that no more
    pages are ever touched than were in use at the same time."""

    def __init__(self, num_pages: int, page_elems: int, dtype: torch.dtype) -> None:
        self._pages = zeros(num_pages * page_elems, dtype, CPU).view(num_pages, page_elems)
        self._free = list(range(num_pages - 1, -1, -1))
        self._lock = Lock()

    def take(self, num_pages: int) -> Blob:
        """Returns a blob of zeros. Raises MemoryError if too few pages are free: callers reserve them first."""
        with self._lock:
            if num_pages > len(self._free):
                raise MemoryError(f"{num_pages} pages for an adapter, and {len(self._free)} are free in host memory")
            pages = sorted(self._free.pop() for _ in range(num_pages))
        for (run,) in runs(pages):
            self._pages[run].zero_()
        return Blob(self._pages, np.asarray(pages, dtype=np.int64))

    def give(self, blob: Blob) -> None:
        with self._lock:
            self._free += blob.pages[::-1].tolist()


class PinnedMemory:
    """A `HostMemory` for a GPU, which copies from pinned memory. torch caches freed memory and reuses it once no copy
    reads it."""

    def __init__(self, page_elems: int, dtype: torch.dtype) -> None:
        self._page_elems = page_elems
        self._dtype = dtype

    def take(self, num_pages: int) -> Blob:
        return Blob.of(torch.zeros(num_pages, self._page_elems, dtype=self._dtype, pin_memory=True))

    def give(self, blob: Blob) -> None:
        """Does nothing, because the memory is freed with its last reference."""


def make_host_memory(size_gb: float, page_elems: int, dtype: torch.dtype, device: torch.device) -> HostMemory:
    """Returns host memory for adapters: at most `size_gb` GiB in pages for a CPU; for a GPU the size is ignored. Raises
    ValueError if the system does not provide that much."""
    if device.type == "cuda":
        return PinnedMemory(page_elems, dtype)
    try:
        return PagedMemory(int(size_gb * GIB) // (page_elems * dtype.itemsize), page_elems, dtype)
    except MemoryError as error:
        raise ValueError(f"the system gives no {size_gb:g} GiB for engine.host_adapter_gb; lower it") from error


def runs(*lists: Longs | Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """Splits equally long lists into the longest stretches in which every list counts up by one. Yields, for each
    stretch, the range of each list's values as a slice."""
    table = np.asarray(lists, dtype=np.int64)
    breaks = np.flatnonzero((np.diff(table) != 1).any(axis=0)) + 1
    for first, last in pairwise([0, *breaks.tolist(), table.shape[1]]):
        if first < last:
            yield tuple(slice(start, start + last - first) for start in table[:, first].tolist())
