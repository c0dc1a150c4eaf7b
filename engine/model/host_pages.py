"""Saves KV pages of preempted sequences to host memory, and restores them into other pages of the arena."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from engine.core.types import PageCopy
from engine.model.host_memory import Longs, runs
from lora_kernels.pinned import upload

STAGING_BYTES = 64 << 20
"""Size of the staging buffer in bytes, which PCIe transfers in a millisecond or two. A plan that saves more waits for
all parts of that size but the last."""


class HostPages:
    """Pages of host memory, with copies in both directions between them and the arena.

    Copies pass through a staging buffer on the device. A save gathers pages into the buffer in kernel order, so that
    later kernels may overwrite the pages at once; a separate stream copies the buffer to the host, so that the step
    does not wait. A restore uses the same stream, after every earlier save, and later kernels wait for the restore.
    There is one copy for each run of neighbouring host pages, by the GPU or, on a CPU, by memcpy.

    Args:
        pages: [num_pages, page_elems] in host memory, pinned if the arena is on a GPU.
        device: where the arena is.

    Attributes:
        pages: the argument. On a GPU, the contents are defined once the device is synchronised.
    """

    def __init__(self, pages: Tensor, device: torch.device) -> None:
        self.pages = pages
        num_pages, page_elems = pages.shape
        rows = max(1, min(num_pages, STAGING_BYTES // (page_elems * pages.itemsize)))
        self._staging = torch.empty(rows, page_elems, dtype=pages.dtype, device=device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def save(self, arena: Tensor, copies: tuple[PageCopy, ...]) -> None:
        """Copies pages of `arena` ([num_pages, page_elems]) to host pages, as `copies` pairs them. The host does not
        wait for a GPU; kernels launched later may overwrite the pages."""
        for pages, host_pages in self._parts(copies):
            index = upload(pages, arena.device)
            self._wait_for_copies()
            rows = torch.index_select(arena, 0, index, out=self._staging[: len(pages)])
            self._wait_for_kernels()
            with torch.cuda.stream(self._stream):
                for host, row in runs(host_pages, range(len(pages))):
                    self.pages[host].copy_(rows[row], non_blocking=True)

    def restore(self, arena: Tensor, copies: tuple[PageCopy, ...]) -> None:
        """Copies host pages to pages of `arena` ([num_pages, page_elems]), as `copies` pairs them. The host does not
        wait for a GPU; kernels launched later wait for the copies."""
        for pages, host_pages in self._parts(copies):
            index, rows = upload(pages, arena.device), self._staging[: len(pages)]
            self._wait_for_kernels()
            with torch.cuda.stream(self._stream):
                for host, row in runs(host_pages, range(len(pages))):
                    rows[row].copy_(self.pages[host], non_blocking=True)
            self._wait_for_copies()
            arena.index_copy_(0, index, rows)

    def _parts(self, copies: tuple[PageCopy, ...]) -> Iterator[tuple[Longs, Longs]]:
        """Yields (pages, host pages) of the copies, ordered by host page, as many at once as the staging buffer
        holds."""
        pages, host_pages = np.asarray(copies, dtype=np.int64).reshape(-1, 2).T
        order, size = host_pages.argsort(kind="stable"), len(self._staging)
        for part in (order[start : start + size] for start in range(0, len(order), size)):
            yield pages[part], host_pages[part]

    def _wait_for_copies(self) -> None:
        """Makes kernels launched later wait for every copy so far. Does nothing on a CPU."""
        if self._stream is not None:
            torch.cuda.current_stream(self._staging.device).wait_stream(self._stream)

    def _wait_for_kernels(self) -> None:
        """Makes later copies wait for every kernel launched so far. Does nothing on a CPU."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._staging.device))
