"""Timeouts for calls to Redis that hardly count stalls of this process itself.

A plain timer blames Redis for every second in which the event loop did not run: the reply is already in the socket,
but the loop handles the expired timer first. Here a timeout is cut into slices, each with its own timer that is started
when the previous one has fired. A stall of any length prolongs only one slice, and the loop reads its sockets before
the next slice ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

SLICES = 5
"""Number of slices in the usual timeout of one call."""


class Ticker:
    """Calls `tick` every `seconds` after `start`, while `tick` returns True. Ticks missed in a stall are skipped."""

    def __init__(self, seconds: float, tick: Callable[[], bool]) -> None:
        self._seconds = seconds
        self._tick = tick
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        if self._handle is None:
            self._handle = asyncio.get_running_loop().call_later(self._seconds, self._ring)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _ring(self) -> None:
        self._handle = None
        if self._tick():
            self.start()


@asynccontextmanager
async def loop_timeout(seconds: float, patience: int) -> AsyncGenerator[None, None]:
    """Raise TimeoutError when the body has taken `patience` times `seconds`, not counting stalls of the event loop."""
    left = SLICES * patience

    def tick() -> bool:
        nonlocal left
        left -= 1
        if left == 0:
            timeout.reschedule(asyncio.get_running_loop().time())
        return left > 0

    ticker = Ticker(seconds / SLICES, tick)
    async with asyncio.timeout(None) as timeout:
        ticker.start()
        try:
            yield
        finally:
            ticker.stop()
