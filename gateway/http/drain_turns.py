"""Drains the bodies of refused requests a little at a time, so that many together do not hold the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

DRAINED_BYTES = 2**20
"""Bytes of such bodies after which connections wait for their turns until DRAIN_PAUSE_S has passed."""
DRAIN_PAUSE_S = 0.005
CONNECTIONS_AT_ONCE = 4
"""Connections that are read again after each pause. A read has up to 256 KB and takes 0.1 ms."""


class DrainTurns:
    """Lets the connections of a port read on whose peers still send a body when their response is complete. 143 of them
    were drained of 100 MB in one iteration of the event loop, which took 40 ms."""

    def __init__(self) -> None:
        self._drained = 0
        """Bytes drained since the last pause."""
        self._waiting: deque[Callable[[], None]] = deque()
        self._tick_handle: asyncio.TimerHandle | None = None

    def has_room(self, num_bytes: int) -> bool:
        """Count drained bytes. Returns whether their connection may read on at once."""
        self._drained += num_bytes
        self._tick_later()
        return self._drained < DRAINED_BYTES

    def wait(self, read_on: Callable[[], None]) -> None:
        """Call `read_on` when it is the connection's turn, also if that has ended by then."""
        self._waiting.append(read_on)
        self._tick_later()

    def _tick_later(self) -> None:
        if self._tick_handle is None:
            self._tick_handle = asyncio.get_running_loop().call_later(DRAIN_PAUSE_S, self._tick)

    def _tick(self) -> None:
        self._tick_handle, self._drained = None, 0
        for _ in range(min(CONNECTIONS_AT_ONCE, len(self._waiting))):
            self._waiting.popleft()()
        if self._waiting:
            self._tick_later()
