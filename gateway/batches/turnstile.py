"""Who waits to go on, and how many may: in an order of their own, as room comes and goes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Order = tuple[Any, ...]
"""The least goes first."""


class Turnstile:
    """Whoever has been let through counts as `inside` until `leave`."""

    def __init__(self, room: Callable[[], int]) -> None:
        """`room`: how many more may go through now."""
        self.inside = 0
        self._room = room
        self._numbers = itertools.count()
        self._waiting: list[tuple[Order, int, asyncio.Future[None]]] = []
        self._gone = 0
        """Of those in the heap, who does not wait any more."""

    @property
    def queued(self) -> int:
        return len(self._waiting) - self._gone

    async def enter(self, order: Order) -> None:
        """Returns inside. Cancelled, it has taken nobody's place."""
        turn = asyncio.get_running_loop().create_future()
        heappush(self._waiting, (order, next(self._numbers), turn))
        self.turn()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._gone += 1
            else:
                self.leave()
            raise

    def leave(self) -> None:
        self.inside -= 1
        self.turn()

    def turn(self) -> None:
        """Lets in whom there is room for: to be called whenever there may be more of it."""
        room = self._room() if self.queued else 0
        while room > 0 and self.queued:
            _, _, turn = heappop(self._waiting)
            if turn.cancelled():
                self._gone -= 1
                continue
            turn.set_result(None)
            self.inside += 1
            room -= 1
