"""An ordered queue that admits as many waiters as there is room for."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Order = tuple[Any, ...]
"""Sort key of a waiter. The least goes first."""


class Turnstile:
    """Admits waiters in order. An admitted waiter counts as `inside` until `leave`."""

    def __init__(self, room: Callable[[], int]) -> None:
        """`room` returns how many more waiters may be admitted now."""
        self.inside = 0
        self.queued = 0
        self._room = room
        self._numbers = itertools.count()
        self._waiting: list[tuple[Order, int, asyncio.Future[None]]] = []

    async def enter(self, order: Order) -> None:
        """Wait until admitted. A cancelled waiter takes up no room."""
        turn = asyncio.get_running_loop().create_future()
        heappush(self._waiting, (order, next(self._numbers), turn))
        self.queued += 1
        self.turn()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self.queued -= 1
            else:
                self.leave()
            raise

    def leave(self) -> None:
        self.inside -= 1
        self.turn()

    def turn(self) -> None:
        """Admit as many waiters as there is room for. Call this whenever there may be more room."""
        room = self._room() if self._waiting else 0
        while room > 0 and self._waiting:
            _, _, turn = heappop(self._waiting)
            if not turn.cancelled():
                turn.set_result(None)
                self.queued -= 1
                self.inside += 1
                room -= 1
