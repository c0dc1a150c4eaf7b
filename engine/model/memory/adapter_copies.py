"""Copies adapters from host memory into device pages. On a GPU a separate stream copies pages and records a mark after
each layer's, for which kernels wait only at that layer. Pages that earlier steps use are copied last."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.core.messages.requests import PageId
from engine.model.memory.host import Blob, runs
from lora_kernels.layout import AdapterLayout

Flags = npt.NDArray[np.bool_]
Mark = Any
"""A point in a queue of copies, for example a CUDA event."""


class CopyQueue(Protocol):
    """Protocol of a queue of copies from host memory to a GPU, by which adapters are loaded. The copies run
    concurrently with kernels, in the order in which they were enqueued."""

    def after_kernels(self) -> None:
        """Make copies that are enqueued from now on wait for every kernel launched so far. The host does not wait."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue a copy from `source`, in pinned host memory, to `target`, which has the same shape."""

    def mark(self) -> Mark:
        """Record and return a mark in the copy queue (a CUDA event), which is reached once every copy enqueued so far
        is done."""

    def before_kernels(self, mark: Mark) -> None:
        """Make kernels launched from now on wait for every copy enqueued before `mark`. The host does not wait."""

    def finish(self, mark: Mark) -> None:
        """Block until the copies before `mark` are done. Any thread may call it."""

    def seconds(self, first: Mark, last: Mark) -> float:
        """Block until the copies before `last` are done. Return the seconds that passed between two marks of the copy
        queue."""


class CudaQueue:
    """A `CopyQueue` on a CUDA stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def after_kernels(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def before_kernels(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)

    def finish(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def seconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        last.synchronize()
        return first.elapsed_time(last) / 1000


class AdapterCopies(Protocol):
    """Copies adapters from host memory into pages of the arena. Copies begun between two `close` calls belong to one
    step."""

    def begin(self, blob: Blob, pages: tuple[PageId, ...], layout: AdapterLayout, busy: Flags | None = None) -> None:
        """Start to copy a packed adapter for the current step: page i of `blob` goes to page `pages[i]` of the arena.
        Pages that are `busy` (bool [num_pages], None: all) are copied after all kernels launched so far."""

    def wait(self, layer: int) -> None:
        """Make kernels launched from now on wait until this layer's part of every adapter begun in the current step is
        copied. The host does not wait."""

    def close(self) -> None:
        """End the current step's adapter copies: later copies belong to the next step, and kernels launched later wait
        for all copies begun so far."""

    def fence(self) -> Callable[[], None]:
        """Return a function that blocks until every adapter copy begun so far is done. It is called, by any thread,
        before the host memory that these copies read is reused."""

    def finish(self) -> tuple[float, ...]:
        """Block until the adapter copies of the oldest closed step, or of the current one, are done, and forget it.
        Return the seconds that each adapter's copy took, in the order of `begin`."""


class PlainCopies:
    """An `AdapterCopies` for a CPU: each copy is complete when `begin` returns, so `wait` does nothing."""

    def __init__(self, arena: Tensor) -> None:
        self._arena = arena
        self._seconds: list[float] = []
        self._closed: deque[tuple[float, ...]] = deque()

    def begin(self, blob: Blob, pages: tuple[PageId, ...], layout: AdapterLayout, busy: Flags | None = None) -> None:
        started = time.perf_counter()
        for target, source in runs(pages, blob.pages):
            self._arena[target].copy_(blob.memory[source])
        self._seconds.append(time.perf_counter() - started)

    def wait(self, layer: int) -> None:
        """Do nothing, because on a CPU an adapter's copy into the arena is complete when `begin` returns."""

    def close(self) -> None:
        self._closed.append(tuple(self._seconds))
        self._seconds = []

    def fence(self) -> Callable[[], None]:
        """Return a function that does nothing, because on a CPU an adapter's copy into the arena is complete when
        `begin` returns."""
        return lambda: None

    def finish(self) -> tuple[float, ...]:
        if not self._closed:
            self.close()
        return self._closed.popleft()


@dataclass(frozen=True, slots=True)
class _Copy:
    """The copy of one adapter: `spans` are the marks before and after each sequence of its page copies, from which its
    duration is measured, and `layers` the mark that the kernels of each layer wait for."""

    spans: tuple[tuple[Mark, Mark], ...]
    layers: tuple[Mark, ...]


class QueuedCopies:
    """An `AdapterCopies` that enqueues its copies in a `CopyQueue`. Kernels wait for them layer by layer."""

    def __init__(self, arena: Tensor, queue: CopyQueue) -> None:
        self._arena = arena
        self._queue = queue
        self._copies: list[_Copy] = []
        self._closed: deque[list[_Copy]] = deque()

    def begin(self, blob: Blob, pages: tuple[PageId, ...], layout: AdapterLayout, busy: Flags | None = None) -> None:
        late = np.ones(len(pages), dtype=np.bool_) if busy is None else busy
        ends = _page_ends(layout, self._arena.shape[1])
        spans: list[tuple[Mark, Mark]] = []
        layers: list[Mark] = []
        if not late.any() or not late.all():  # also for an adapter without pages
            layers = self._copy(blob, pages, ends, ~late, spans)
        if late.any():
            self._queue.after_kernels()
            first_late = int(late.argmax())
            layers = [mark for mark, end in zip(layers, ends, strict=False) if end <= first_late]
            layers += self._copy(blob, pages, ends, late, spans)[len(layers) :]
        self._copies.append(_Copy(tuple(spans), tuple(layers)))

    def _copy(
        self, blob: Blob, pages: tuple[PageId, ...], ends: list[int], chosen: Flags, spans: list[tuple[Mark, Mark]]
    ) -> list[Mark]:
        """Enqueue the copies of the `chosen` pages (bool [pages of the blob]), layer by layer, and append the marks
        around them to `spans`. Return the mark after each layer's pages."""
        begun, marks, done = self._queue.mark(), [], 0
        for end in ends:
            part = done + np.flatnonzero(chosen[done:end])
            for target, source in runs([pages[index] for index in part], blob.pages[part]):
                self._queue.copy(self._arena[target], blob.memory[source])
            marks.append(self._queue.mark())
            done = end
        spans.append((begun, marks[-1]))
        return marks

    def wait(self, layer: int) -> None:
        if self._copies:  # copies run in order, so the last one's mark comes after those of all
            self._queue.before_kernels(self._copies[-1].layers[layer])

    def close(self) -> None:
        if self._copies:
            self._queue.before_kernels(self._copies[-1].layers[-1])
        self._closed.append(self._copies)
        self._copies = []

    def fence(self) -> Callable[[], None]:
        return partial(self._queue.finish, self._queue.mark())

    def finish(self) -> tuple[float, ...]:
        if not self._closed:
            self.close()
        return tuple(sum(self._queue.seconds(*span) for span in copy.spans) for copy in self._closed.popleft())


def make_copies(arena: Tensor) -> AdapterCopies:
    """Return `QueuedCopies` on a CUDA stream if the arena ([num_pages, page_elems]) is on a GPU, else `PlainCopies`."""
    return QueuedCopies(arena, CudaQueue(arena.device)) if arena.device.type == "cuda" else PlainCopies(arena)


def _page_ends(layout: AdapterLayout, page_elems: int) -> list[int]:
    """Return, for each layer, how many leading pages of the blob must be copied before its kernels may run: those that
    hold it and all layers before it, and for the last layer all pages."""
    last_tiles = layout.offsets.reshape(len(layout.offsets), -1).max(axis=1)
    touched = layout.ranks.any(axis=1)
    tokens = max(layout.token_offsets, default=-1) // page_elems + 1  # before every layer
    ends = np.maximum.accumulate(np.where(touched, last_tiles // page_elems + 1, tokens)).tolist()
    return [*ends[:-1], layout.num_pages]
