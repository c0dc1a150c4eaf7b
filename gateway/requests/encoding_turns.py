"""Tenants take turns in work on long requests to which no limit of a tenant applies yet: parsing bodies, and counting,
encoding or decoding tokens, of which 8 MiB take seconds in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from gateway.requests.tenant_room import TenantRoom

AT_ONCE = 2
"""Maximum number of requests that only count, encode or decode tokens in work at the same time, because generations
need the threads, too."""
MOST_BYTES = 64 * 2**20
"""Maximum bytes of one tenant's requests that wait or are in work: eight of the longest. They are in memory, also if
their callers have left."""


class EncodingTurns:
    """Bounds the requests in work to a number, and to one of each tenant, so that another tenant's request waits for
    few of them, however many one tenant has sent."""

    def __init__(self, most_bytes: int = MOST_BYTES, at_once: int = AT_ONCE) -> None:
        """`most_bytes` is the maximum for one tenant; a single request may have more. `at_once` is the maximum number
        of requests in work."""
        self._room = TenantRoom(most_bytes, "your requests that wait here have {held} bytes; try again later")
        self._all = asyncio.Semaphore(at_once)
        self._own: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """Semaphore of each tenant that has such requests."""

    @asynccontextmanager
    async def take(self, tenant: str, num_bytes: int) -> AsyncIterator[None]:
        """Wait until a tenant's request of `num_bytes` bytes may be worked on, which the block does. Raises ApiError
        (RATE_LIMIT_EXCEEDED): the tenant's other requests leave no room for it."""
        with self._room.taken(tenant, num_bytes):
            if (own := self._own.get(tenant)) is None:
                own = self._own[tenant] = asyncio.Semaphore(1)
            async with own, self._all:
                yield
