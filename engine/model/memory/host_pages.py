"""Saves KV pages of preempted sequences to host memory, and restores them into other pages of the arena."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from engine.core.messages.requests import HostPageId
from engine.core.messages.step import PageCopy
from engine.model.memory.host import Longs, runs
from lora_kernels.pinned import upload

STAGING_BYTES = 32 << 20
"""Size of each of the two staging buffers in bytes, which PCIe transfers in about a millisecond. A plan that moves more
in one direction waits for all parts of that size but the last."""


class HostPages:
    """Pages of host memory, [num_pages, page_elems], pinned for a GPU, to which KV of the arena is saved (swapped
    out)."""

    # Copies pass through staging buffers on the device and a stream of their own. A save gathers pages in kernel order,
    # so that later kernels may overwrite them at once; a restore's transfer runs beside the steps under way, and later
    # kernels wait for it.
    def __init__(self, pages: Tensor, device: torch.device) -> None:
        self.pages = pages
        """The argument. On a GPU, the contents are defined once the device is synchronised."""
        num_pages, page_elems = pages.shape
        rows = max(1, min(num_pages, STAGING_BYTES // (page_elems * pages.itemsize)))
        self._saved, self._restored = torch.empty(2, rows, page_elems, dtype=pages.dtype, device=device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._bytes = pages.view(torch.uint8).numpy()
        self._emptied: torch.cuda.Event | None = None
        """Event after the kernels that read the buffer of the last restore. None means that there was no restore, or
        that the arena is on a CPU."""

    def move(self, arena: Tensor, saves: tuple[PageCopy, ...], restores: tuple[PageCopy, ...]) -> None:
        """Copy pages of `arena` ([num_pages, page_elems]) to host pages, as `saves` pairs them, and then other host
        pages to the arena, as `restores` does. The host does not wait; kernels launched later see the result."""
        parts = list(self._parts(restores))
        for _, host_pages in parts[:1]:  # before the saves, which would hold it up until the step under way is done
            self._fetch(host_pages)
        for pages, host_pages in self._parts(saves):
            self._save(arena, pages, host_pages)
        for number, (pages, host_pages) in enumerate(parts):
            if number:
                self._fetch(host_pages)
            self._place(arena, pages)

    @property
    def page_bytes(self) -> int:
        return self._bytes.shape[1]

    def page(self, host_page: HostPageId) -> memoryview:
        return memoryview(self._bytes[host_page])

    def settle(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _save(self, arena: Tensor, pages: Longs, host_pages: Longs) -> None:
        index = upload(pages, arena.device)
        self._wait_for_copies()
        rows = torch.index_select(arena, 0, index, out=self._saved[: len(pages)])
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(arena.device))
        with torch.cuda.stream(self._stream):
            for host, row in runs(host_pages, range(len(pages))):
                self.pages[host].copy_(rows[row], non_blocking=True)

    def _fetch(self, host_pages: Longs) -> None:
        """Start to copy saved host pages into the device's staging buffer of restores, as soon as kernels have read
        what it held."""
        if self._stream is not None and self._emptied is not None:
            self._stream.wait_event(self._emptied)
        with torch.cuda.stream(self._stream):
            for host, row in runs(host_pages, range(len(host_pages))):
                self._restored[row].copy_(self.pages[host], non_blocking=True)

    def _place(self, arena: Tensor, pages: Longs) -> None:
        """Copy the pages in the staging buffer of restores to `pages` of the arena, in kernel order."""
        index = upload(pages, arena.device)
        self._wait_for_copies()
        arena.index_copy_(0, index, self._restored[: len(pages)])
        if self._stream is not None:
            self._emptied = torch.cuda.Event()
            self._emptied.record(torch.cuda.current_stream(arena.device))

    def _parts(self, copies: tuple[PageCopy, ...]) -> Iterator[tuple[Longs, Longs]]:
        """Yield (pages, host pages) of the copies, ordered by host page, as many at once as a staging buffer holds."""
        pages, host_pages = np.asarray(copies, dtype=np.int64).reshape(-1, 2).T
        order, size = host_pages.argsort(kind="stable"), len(self._saved)
        for part in (order[start : start + size] for start in range(0, len(order), size)):
            yield pages[part], host_pages[part]

    def _wait_for_copies(self) -> None:
        """Make kernels launched later wait for every copy between host pages and staging buffers so far. Does nothing
        on a CPU."""
        if self._stream is not None:
            torch.cuda.current_stream(self._saved.device).wait_stream(self._stream)
