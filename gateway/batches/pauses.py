"""Pauses of long work on the event loop."""

from __future__ import annotations

import asyncio
import time

SLICE_SECONDS = 0.002


class LoopPauses:
    """Gives the event loop a turn after every SLICE_SECONDS of one piece of work, such as of 50,000 lines."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    async def pause_if_due(self) -> None:
        if time.perf_counter() - self._began > SLICE_SECONDS:
            await asyncio.sleep(0)
            self._began = time.perf_counter()
