"""Where packed adapters lie in host memory, and how that memory is used again.

On a CPU they share one arena of pages, and a page that an adapter leaves is the next one's: memory fresh from the
system is cleared first, and on a virtual machine whose host takes free pages back it has to be found again. Measured on
one: up to 2.5 ms a MB, half of what a fetch took while steps beside it waited for their core.
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
    """A packed adapter: those `pages` (int64 [num_pages]) of `memory` ([any number, page_elems]), in their order."""

    memory: Tensor
    pages: Longs

    @classmethod
    def of(cls, memory: Tensor) -> Blob:
        """All of `memory` ([num_pages, page_elems])."""
        return cls(memory, np.arange(len(memory)))

    @property
    def nbytes(self) -> int:
        return len(self.pages) * self.memory.shape[1] * self.memory.itemsize

    def contents(self) -> Tensor:
        """[num_pages, page_elems], a copy."""
        return self.memory[torch.from_numpy(self.pages)]

    def fill(self, contents: Tensor) -> None:
        """With [num_pages, page_elems]."""
        self.memory[torch.from_numpy(self.pages)] = contents

    def places(self, offsets: Longs) -> Longs:
        """Where elements of the blob lie in `memory`, seen as flat."""
        pages, within = np.divmod(offsets, self.memory.shape[1])
        return self.pages[pages] * self.memory.shape[1] + within


class HostMemory(Protocol):
    """May be used from any thread."""

    def take(self, num_pages: int) -> Blob:
        """Zeros."""

    def give(self, blob: Blob) -> None:
        """Back; nobody reads or writes it any more."""


class PagedMemory:
    """Pages of one arena. Those that were used last are used first, so that no more are ever touched than were needed
    at once."""

    def __init__(self, num_pages: int, page_elems: int, dtype: torch.dtype) -> None:
        self._pages = zeros(num_pages * page_elems, dtype, CPU).view(num_pages, page_elems)
        self._free = list(range(num_pages - 1, -1, -1))
        self._lock = Lock()

    def take(self, num_pages: int) -> Blob:
        """Raises MemoryError: whoever asks has not seen to it that there is room."""
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
    """What a GPU copies from. torch keeps what is given back, and gives it out again once no copy reads it."""

    def __init__(self, page_elems: int, dtype: torch.dtype) -> None:
        self._page_elems = page_elems
        self._dtype = dtype

    def take(self, num_pages: int) -> Blob:
        return Blob.of(torch.zeros(num_pages, self._page_elems, dtype=self._dtype, pin_memory=True))

    def give(self, blob: Blob) -> None:
        """It goes with its last reference."""


def make_host_memory(size_gb: float, page_elems: int, dtype: torch.dtype, device: torch.device) -> HostMemory:
    """Of at most `size_gb` GiB, which only a CPU's has to know. Raises ValueError: there is not that much."""
    if device.type == "cuda":
        return PinnedMemory(page_elems, dtype)
    try:
        return PagedMemory(int(size_gb * GIB) // (page_elems * dtype.itemsize), page_elems, dtype)
    except MemoryError as error:
        raise ValueError(f"the system gives no {size_gb:g} GiB for engine.host_adapter_gb; lower it") from error


def runs(*lists: Longs | Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """Stretches in which every list counts up by one; of each list, from where to where."""
    table = np.asarray(lists, dtype=np.int64)
    breaks = np.flatnonzero((np.diff(table) != 1).any(axis=0)) + 1
    for first, last in pairwise([0, *breaks.tolist(), table.shape[1]]):
        if first < last:
            yield tuple(slice(start, start + last - first) for start in table[:, first].tolist())
