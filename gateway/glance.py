"""One look at something costly, shared by all who want one at about the same time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")

GLANCE_SECONDS = 1.0


class Glance(Generic[T]):
    """Calls `look` at most once in `seconds`, however many ask: a hundred open consoles cost what one does."""

    def __init__(
        self,
        look: Callable[[], Awaitable[T]],
        seconds: float = GLANCE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._look = look
        self._seconds = seconds
        self._clock = clock
        self._until = 0.0
        self._seen: asyncio.Future[T] | None = None

    async def get(self) -> T:
        """What was seen, at most `seconds` ago. Raises whatever `look` does; a failure is not kept."""
        if self._seen is None or self._clock() >= self._until:
            self._seen = asyncio.ensure_future(self._look())
            self._until = self._clock() + self._seconds
        seen = self._seen
        try:
            return await asyncio.shield(seen)
        except Exception:
            self._forget(seen)
            raise

    def forget(self) -> None:
        """What it looks at has been changed: the next who asks sees that."""
        self._seen = None

    def _forget(self, failed: asyncio.Future[T]) -> None:
        if self._seen is failed:
            self._seen = None
