"""A second stream for kernels that run beside those of the current stream. Recorded in a CUDA graph, it becomes a
parallel branch (CUDA C++ Programming Guide, section Cross-stream Dependencies and Events)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """A stream beside the current one; on a CPU, everything runs in turn. Memory that its kernels use must stay
    allocated until `join`, after which the current stream's kernels may use it again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Launches the kernels of the block on the side stream, where they wait for the kernels launched before."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Makes kernels launched from now on wait for those of the side stream."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
