"""A short-lived cache for the result of a costly query, shared by all callers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")

SHARED_POLL_SECONDS = 1.0


class SharedPoll(Generic[T]):
    """Cache of the result of `look`, which is called at most once in `seconds` for all callers of `get` together,
    except after a failure or a `forget`. `clock` returns monotonic seconds."""

    def __init__(
        self,
        look: Callable[[], Awaitable[T]],
        seconds: float = SHARED_POLL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._look = look
        self._seconds = seconds
        self._clock = clock
        self._until = 0.0
        self._seen: asyncio.Future[T] | None = None

    async def get(self) -> T:
        """Return the result of a call of `look` that began at most `seconds` ago; start a call if there is none. An
        exception of `look` is raised to all waiting callers and not cached. Cancelling `get` does not cancel `look`."""
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
        """Drop the cached result, because the underlying data has changed: the next `get` calls `look` again."""
        self._seen = None

    def _forget(self, failed: asyncio.Future[T]) -> None:
        if self._seen is failed:
            self._seen = None
