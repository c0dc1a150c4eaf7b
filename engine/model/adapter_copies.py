"""Adapters on their way from host memory into pages, beside the kernels that do not need them yet.

A blob holds an adapter's layers in the order they are computed. On a GPU its pages are copied by a stream of their own,
with a mark behind those of each layer, and kernels wait for a layer's mark only when they come to that layer. On a CPU
a copy is there when it is made, and nobody waits.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.core.types import PageId
from engine.model.host_memory import Blob, runs
from lora_kernels.layout import AdapterLayout

Mark = Any
"""A moment in a queue of copies."""


class CopyQueue(Protocol):
    """Copies that run beside kernels, in the order they are asked for."""

    def after_kernels(self) -> None:
        """Copies from here on run after every kernel so far."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Between tensors of one shape, the source in pinned host memory."""

    def mark(self) -> Mark:
        """Behind every copy so far."""

    def before_kernels(self, mark: Mark) -> None:
        """Kernels from here on run after every copy before the mark."""

    def seconds(self, first: Mark, last: Mark) -> float:
        """Between two marks, which must have been passed or will be waited for."""


class CudaQueue:
    """A stream."""

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

    def seconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        last.synchronize()
        return first.elapsed_time(last) / 1000


class AdapterCopies(Protocol):
    """The copies of one step."""

    def begin(self, blob: Blob, pages: tuple[PageId, ...], layout: AdapterLayout) -> None:
        """Copies a packed adapter into as many `pages` as it has."""

    def wait(self, layer: int) -> None:
        """What is computed from here on finds this layer of every adapter."""

    def close(self) -> None:
        """Those of the next step begin; what is computed from here on finds all before them."""

    def finish(self) -> tuple[float, ...]:
        """The seconds each copy took of the oldest closed step, in the order they began; closes one if none is. Waits
        for them."""


class PlainCopies:
    """Copies that are there when they are made."""

    def __init__(self, arena: Tensor) -> None:
        self._arena = arena
        self._seconds: list[float] = []
        self._closed: deque[tuple[float, ...]] = deque()

    def begin(self, blob: Blob, pages: tuple[PageId, ...], layout: AdapterLayout) -> None:
        started = time.perf_counter()
        for target, source in runs(pages, blob.pages):
            self._arena[target].copy_(blob.memory[source])
        self._seconds.append(time.perf_counter() - started)

    def wait(self, layer: int) -> None:
        """There is nothing to wait for."""

    def close(self) -> None:
        self._closed.append(tuple(self._seconds))
        self._seconds = []

    def finish(self) -> tuple[float, ...]:
        if not self._closed:
            self.close()
        return self._closed.popleft()


@dataclass(frozen=True, slots=True)
class _Copy:
    begun: Mark
    layers: tuple[Mark, ...]


class QueuedCopies:
    """Copies that kernels wait for layer by layer."""

    def __init__(self, arena: Tensor, queue: CopyQueue) -> None:
        self._arena = arena
        self._queue = queue
        self._copies: list[_Copy] = []
        self._closed: deque[list[_Copy]] = deque()

    def begin(self, blob: Blob, pages: tuple[PageId, ...], layout: AdapterLayout) -> None:
        self._queue.after_kernels()  # which may still read what the pages held before
        begun, marks, done = self._queue.mark(), [], 0
        for end in _page_ends(layout, self._arena.shape[1]):
            for target, source in runs(pages[done:end], blob.pages[done:end]):
                self._queue.copy(self._arena[target], blob.memory[source])
            marks.append(self._queue.mark())
            done = end
        self._copies.append(_Copy(begun, tuple(marks)))

    def wait(self, layer: int) -> None:
        if self._copies:  # one behind the other: the last one's mark is behind those of all
            self._queue.before_kernels(self._copies[-1].layers[layer])

    def close(self) -> None:
        if self._copies:
            self._queue.before_kernels(self._copies[-1].layers[-1])
        self._closed.append(self._copies)
        self._copies = []

    def finish(self) -> tuple[float, ...]:
        if not self._closed:
            self.close()
        return tuple(self._queue.seconds(copy.begun, copy.layers[-1]) for copy in self._closed.popleft())


def make_copies(arena: Tensor) -> AdapterCopies:
    """The copies that suit where the arena is. `arena`: [num_pages, page_elems]."""
    return QueuedCopies(arena, CudaQueue(arena.device)) if arena.device.type == "cuda" else PlainCopies(arena)


def _page_ends(layout: AdapterLayout, page_elems: int) -> list[int]:
    """After how many of its pages each layer of an adapter, and all before it, are complete; the last after all."""
    last_tiles = layout.offsets.reshape(len(layout.offsets), -1).max(axis=1)
    touched = layout.ranks.any(axis=1)
    ends = np.maximum.accumulate(np.where(touched, last_tiles // page_elems + 1, 0)).tolist()
    return [*ends[:-1], layout.num_pages]
