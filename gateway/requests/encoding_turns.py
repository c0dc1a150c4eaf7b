"""Tenants take turns in requests that only count, encode or decode tokens. No limit of a tenant applies to these, and
one of 8 MiB takes seconds in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from gateway.requests.wire_room import WireHold

AT_ONCE = 2
"""Maximum number of such requests in work at the same time, because generations need the threads, too."""


class EncodingTurns:
    """Bounds the requests in work to `AT_ONCE`, and to one of each tenant, so that another tenant's request waits for
    few of them, however many one tenant has sent."""

    def __init__(self) -> None:
        self._all = asyncio.Semaphore(AT_ONCE)
        self._own: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """Semaphore of each tenant that has such requests."""

    @asynccontextmanager
    async def take(self, hold: WireHold) -> AsyncIterator[None]:
        """Wait until the request that has its body in `hold` may be worked on, which the block does. Raises ApiError
        (RATE_LIMIT_EXCEEDED) if by then its tenant leaves so many answers unread that there is no room for this one,
        which may be several times as long as the request."""
        if (own := self._own.get(hold.tenant)) is None:
            own = self._own[hold.tenant] = asyncio.Semaphore(1)
        async with own, self._all:
            hold.take(0)
            yield
