"""How fast lines ask a tenant's limits: more and more at once, until one says no."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf

from gateway.batches.turnstile import Order, Turnstile

FIRST_WINDOW = 16
"""Lines that ask at once before any has been let in."""
FORGOTTEN_SECONDS = 30.0
"""After a refusal, with none since."""
TIMER_SECONDS = 0.01
"""By which a loop's timers may be early."""


class Asking:
    """One line's, until it has been answered."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self.is_over = False

    def admitted(self) -> None:
        self.is_over = True
        self._pace.admitted()


class Pace:
    """After a refusal one line at a time asks, when the wait is over; and one more with each that gets in.

    Who waits here holds no place in the engine.
    """

    def __init__(self) -> None:
        self._turnstile = Turnstile(self._room)
        self._window = FIRST_WINDOW
        self._rest_until = 0.0
        self._refused_at = -inf

    @property
    def is_limited(self) -> bool:
        """Lately refused: more lines of the same tenant would only wait, too."""
        return asyncio.get_running_loop().time() < max(self._refused_at + FORGOTTEN_SECONDS, self._rest_until)

    @property
    def rest(self) -> float:
        """Seconds until the next line asks."""
        return max(0.0, self._rest_until - asyncio.get_running_loop().time())

    @asynccontextmanager
    async def asking(self, order: Order) -> AsyncIterator[Asking]:
        """Entered when a line may ask."""
        await self._turnstile.enter(order)
        asking = Asking(self)
        try:
            yield asking
        finally:
            if not asking.is_over:
                self._turnstile.leave()

    def admitted(self) -> None:
        self._window += 1
        self._turnstile.leave()

    def refused(self, seconds: float) -> None:
        """`seconds`: until asking again is of use."""
        loop = asyncio.get_running_loop()
        self._window, self._refused_at = 1, loop.time()
        self._rest_until = max(self._rest_until, loop.time() + seconds)
        loop.call_at(self._rest_until + TIMER_SECONDS, self._turnstile.turn)

    def _room(self) -> int:
        return 0 if self.rest else self._window - self._turnstile.inside
