"""Tenants take turns in requests that only count, encode or decode tokens. No limit of a tenant applies to these, and
one of 8 MiB takes seconds in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from gateway.requests.wire_room import WireHold

AT_ONCE = 2
"""Maximum number of requests that only count, encode or decode tokens in work at the same time, because generations
need the threads, too."""


class EncodingTurns:
    """Bounds the requests in work to a number, and to one of each tenant, so that another tenant's request waits for
    few of them, however many one tenant has sent."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        """`at_once` is the maximum number of requests in work."""
        self._all = asyncio.Semaphore(at_once)
        self._own: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """Semaphore of each tenant that has such requests."""

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait until a request of the tenant may be worked on, which the block does."""
        if (own := self._own.get(tenant)) is None:
            own = self._own[tenant] = asyncio.Semaphore(1)
        async with own, self._all:
            yield

    @asynccontextmanager
    async def take(self, hold: WireHold) -> AsyncIterator[None]:
        """Wait until the request that has its body in `hold` may be worked on, which the block does. Raises ApiError
        (RATE_LIMIT_EXCEEDED) if by then its tenant leaves so many answers unread that there is no room for this one,
        which may be several times as long as the request."""
        async with self.turn(hold.tenant):
            hold.take(0)
            yield
