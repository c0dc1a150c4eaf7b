"""Time limits of calls to Redis in which a stall of this process itself hardly counts.

A wall clock blames Redis for every second in which the event loop did not run: the answer lies in the socket, and the
timer is looked at first. Here a time limit is cut into slices, each a timer of its own that is set when the one before
has rung. A stall makes one slice longer, whatever its length, and the loop reads its sockets before the next one ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

SLICES = 5
"""Slices of the usual time of one call."""


class Ticker:
    """Calls `tick` every `seconds` from `start` on, as long as it returns True. A late call is one call."""

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
    """Raises TimeoutError when its body has taken `patience` times `seconds`, stalls of the event loop aside."""
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
