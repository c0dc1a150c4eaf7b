"""Reads usage rows from the Redis hashes to which the limiter adds each request's usage."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import date
from typing import Protocol

from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster

from gateway.core.errors import Fault, unavailable
from gateway.core.usage import Counts, RowName, UsageRow
from gateway.redis.client import RedisCalls, StoreError

KEY = re.compile(r"usage:\{(?P<tenant>[^}]+)\}:(?P<day>\d{4}-\d\d-\d\d)$")
PAGES_AT_ONCE, ROWS_AT_ONCE = 8, 200
"""Number of pages, and approximate number of rows of each, that one round trip to Redis reads. The event loop and Redis
are busy only that long, so that tokens of requests are hardly delayed."""


@dataclass(frozen=True, slots=True)
class UsagePage:
    """The Redis hash `key` with the usage rows of one tenant on one day (UTC)."""

    key: str
    tenant: str
    day: date


class UsageBooks(Protocol):
    def rows(self, tenant: str, since: date, until: date) -> AsyncGenerator[Sequence[UsageRow], None]:
        """Yield the rows of one tenant, or of all tenants if `tenant` is empty, from day `since` to day `until` (both
        inclusive), in batches. Rows of today continue to change. Raises ApiError (LIMITER_UNAVAILABLE) if Redis is
        away."""


class RedisUsageBooks:
    """`UsageBooks` in Redis. Its calls are separate from those of the limiter, so that a long report does not delay
    requests."""

    def __init__(self, client: Redis | RedisCluster, *, timeout: float = 5.0, prefix: str = "loralane:") -> None:
        """`timeout` is the time limit of one round trip, in seconds."""
        self._calls = RedisCalls.without_breaker(client, prefix, timeout)
        self._prefix = prefix

    async def rows(self, tenant: str, since: date, until: date) -> AsyncGenerator[Sequence[UsageRow], None]:
        try:
            pages = sorted(await self._pages(tenant, since, until), key=lambda page: (page.day, page.tenant))
            for first in range(0, len(pages), PAGES_AT_ONCE):
                async with aclosing(self._read(pages[first : first + PAGES_AT_ONCE])) as pieces:
                    async for rows in pieces:
                        yield rows
        except StoreError as error:
            raise unavailable(Fault.LIMITER_UNAVAILABLE, "usage cannot be read while Redis is away") from error

    async def _pages(self, tenant: str, since: date, until: date) -> Collection[UsagePage]:
        """Return the pages of a tenant (empty: of all tenants) in the given days, found by scanning Redis's keys,
        because usage of deleted tenants is reported as well. Raises StoreError."""
        pattern = f"{self._prefix}usage:{{{tenant or '*'}}}:*"
        async with self._calls.guard() as client:
            keys = {key.decode() async for key in client.scan_iter(pattern, count=1000)}
        matches = [(key, KEY.search(key)) for key in keys]
        pages = [UsagePage(key, match["tenant"], date.fromisoformat(match["day"])) for key, match in matches if match]
        return [page for page in pages if tenant in ("", page.tenant) and since <= page.day <= until]

    async def _read(self, pages: Sequence[UsagePage]) -> AsyncGenerator[list[UsageRow], None]:
        """Yield the rows of pages in batches, each row once, although a scan of a growing hash may return one twice."""
        cursors, seen = dict.fromkeys(pages, 0), set[tuple[UsagePage, bytes]]()
        while cursors:
            async with self._calls.guard() as client:
                pipeline = client.pipeline(transaction=False)
                for page, cursor in cursors.items():
                    pipeline.hscan(page.key, cursor, count=ROWS_AT_ONCE)
                replies: list[tuple[int, dict[bytes, bytes]]] = await pipeline.execute()
            rows, left = list[UsageRow](), dict[UsagePage, int]()
            for page, (cursor, fields) in zip(cursors, replies, strict=True):
                rows += [_row(page, name, words) for name, words in fields.items() if (page, name) not in seen]
                if cursor:
                    left[page] = cursor
                    seen.update((page, name) for name in fields)
            yield rows
            cursors = left


def _row(page: UsagePage, name: bytes, words: bytes) -> UsageRow:
    return UsageRow(page.tenant, page.day, RowName.read(name.decode()), Counts.read(words.decode()))
