"""Controls how many lines of a shard ask the tenant's limits at once: more and more, until a limit refuses one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf

from gateway.batches.gate import AdmissionQueue, Order

FIRST_WINDOW = 16
"""Lines that may ask at once before any has been admitted."""
FORGOTTEN_SECONDS = 30.0
"""Seconds after the last refusal until it is forgotten."""
TIMER_SECONDS = 0.01
"""Margin in seconds, because the loop's timers may fire early."""


class LimitAttempt:
    """A line's request to the limits, until it is admitted or has ended."""

    def __init__(self, window: LimitWindow) -> None:
        self._limits = window
        self.is_over = False

    def admitted(self) -> None:
        self.is_over = True
        self._limits.admitted()


class LimitWindow:
    """Window of the lines that ask the limits at once. After a refusal, one line asks when the wait is over, and each
    admitted line lets one more ask at once.

    Lines that wait here hold no place in the engine.
    """

    def __init__(self) -> None:
        self._queue = AdmissionQueue(self._room)
        self._window = FIRST_WINDOW
        self._rest_until = 0.0
        self._refused_at = -inf

    @property
    def is_limited(self) -> bool:
        """True if a limit recently refused a line: more lines of the same tenant would only wait too."""
        return asyncio.get_running_loop().time() < max(self._refused_at + FORGOTTEN_SECONDS, self._rest_until)

    @property
    def seconds_to_next(self) -> float:
        """Seconds until the next line asks."""
        return max(0.0, self._rest_until - asyncio.get_running_loop().time())

    @asynccontextmanager
    async def attempt(self, order: Order) -> AsyncIterator[LimitAttempt]:
        """Wait until the line may ask the limits."""
        await self._queue.enter(order)
        asking = LimitAttempt(self)
        try:
            yield asking
        finally:
            if not asking.is_over:
                self._queue.leave()

    def admitted(self) -> None:
        self._window += 1
        self._queue.leave()

    def refused(self, seconds: float) -> None:
        """Note that a limit refused a line. `seconds` is the time after which asking again is useful."""
        loop = asyncio.get_running_loop()
        self._window, self._refused_at = 1, loop.time()
        self._rest_until = max(self._rest_until, loop.time() + seconds)
        loop.call_at(self._rest_until + TIMER_SECONDS, self._queue.admit)

    def _room(self) -> int:
        return 0 if self.seconds_to_next else self._window - self._queue.inside
