"""Has long messages that have arrived copied one after the other, so that many together do not hold the event loop.

gRPC keeps a message outside of Python until it is whole, and copies it on the event loop when the coroutine that reads
it goes on: some 10 ms for the longest. The 16 that a tenant may send side by side are whole at the same time, and were
all copied in one iteration of the loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Coroutine, Generator
from types import coroutine
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

COPIED_BYTES = 2**20
"""Bytes of one caller's messages after which its next one waits for COPY_PAUSE_S."""
COPY_PAUSE_S = 0.005
"""Seconds that the event loop has for others then."""
UNCOUNTED_BYTES = 4 * 2**10
"""Maximum bytes of a message whose copy is not counted, because to count it takes as long."""


class Waiting(NamedTuple):
    """A message that is whole and waits to be copied."""

    reading: Coroutine[Any, Any, Any]
    """Coroutine of gRPC, whose next step copies the message and returns it."""
    message: asyncio.Future[Any]
    """The copy, or the exception that `reading` raises."""


class CopyTurns:
    """Copies each caller's messages up to COPIED_BYTES, and the one that exceeds them, in COPY_PAUSE_S. Used from the
    event loop's thread only."""

    def __init__(self) -> None:
        self._copied: Counter[str] = Counter()
        """Bytes of each caller that have been copied since the last pause."""
        self._waiting: dict[str, deque[Waiting]] = {}
        self._tick_handle: asyncio.TimerHandle | None = None

    async def read(self, caller: str, reading: Coroutine[Any, Any, T]) -> T:
        """Return what `reading` reads for a caller, or raise what it raises: a coroutine of gRPC that awaits nothing
        but a future, which is done when the message is whole."""
        try:
            whole = reading.send(None)
        except StopIteration as ended:
            return ended.value
        try:
            await _done(whole)
        except asyncio.CancelledError:
            if whole.cancelled():
                reading.close()
            else:
                self._wait(caller, reading)  # gRPC frees a message only when it is copied
            raise
        except Exception:
            return self._copy(caller, reading)  # raises it, too
        if caller in self._waiting or self._copied[caller] >= COPIED_BYTES:
            return await self._wait(caller, reading)
        return self._copy(caller, reading)

    def _copy(self, caller: str, reading: Coroutine[Any, Any, T]) -> T:
        """Have a message that is whole copied, and return it."""
        try:
            reading.send(None)
        except StopIteration as ended:
            message = ended.value
        else:
            raise RuntimeError("the coroutine that reads a message awaits more than the message")
        if isinstance(message, bytes) and len(message) > UNCOUNTED_BYTES:
            self._copied[caller] += len(message)
            self._tick_later()
        return message

    def _wait(self, caller: str, reading: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Have a message that is whole copied when it is the caller's turn. If the future is cancelled, the message is
        copied nevertheless."""
        waiting = Waiting(reading, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(caller, deque()).append(waiting)
        self._tick_later()
        return waiting.message

    def _tick_later(self) -> None:
        if self._tick_handle is None:
            self._tick_handle = asyncio.get_running_loop().call_later(COPY_PAUSE_S, self._tick)

    def _tick(self) -> None:
        self._tick_handle = None
        self._copied.clear()
        for caller, queue in list(self._waiting.items()):
            while queue and self._copied[caller] < COPIED_BYTES:
                self._serve(caller, queue.popleft())
            if not queue:
                del self._waiting[caller]
        if self._waiting:
            self._tick_later()

    def _serve(self, caller: str, waiting: Waiting) -> None:
        message = waiting.message
        try:
            copy = self._copy(caller, waiting.reading)
        except Exception as error:
            if not message.done():
                message.set_exception(error)
        else:
            if not message.done():
                message.set_result(copy)


@coroutine
def _done(future: asyncio.Future[Any]) -> Generator[Any, Any, None]:
    """Wait for a future that a coroutine has yielded to be awaited. `await` would find it awaited already."""
    yield future
