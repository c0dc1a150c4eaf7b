"""Reads usage rows from the Redis hashes that settlements write."""

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
"""Number of pages, and approximate number of rows of each, that one round trip reads. Tokens are delayed by no more
than that takes."""


@dataclass(frozen=True, slots=True)
class UsagePage:
    """The usage rows of one tenant on one day."""

    key: str
    tenant: str
    day: date


class UsageBooks(Protocol):
    def rows(self, tenant: str, since: date, until: date) -> AsyncGenerator[Sequence[UsageRow], None]:
        """Yield the rows of one tenant, or of all tenants if `tenant` is empty, in several pieces. Both days are
        included. Rows of today continue to change.

        Raises:
            ApiError: LIMITER_UNAVAILABLE, Redis is away.
        """


class RedisUsageBooks:
    """`UsageBooks` in Redis. Its calls are separate from those of the limiter, so that a long report does not keep
    requests from Redis."""

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
        """Find pages by scanning the keys, because usage of deleted tenants is reported as well."""
        pattern = f"{self._prefix}usage:{{{tenant or '*'}}}:*"
        async with self._calls.guard() as client:
            keys = {key.decode() async for key in client.scan_iter(pattern, count=1000)}
        found = [(key, KEY.search(key)) for key in keys]
        pages = [UsagePage(key, match["tenant"], date.fromisoformat(match["day"])) for key, match in found if match]
        return [page for page in pages if tenant in ("", page.tenant) and since <= page.day <= until]

    async def _read(self, pages: Sequence[UsagePage]) -> AsyncGenerator[list[UsageRow], None]:
        """Yield the rows in pieces. A row that a scan returns twice, as while a hash grows, is yielded once."""
        cursors, seen = dict.fromkeys(pages, 0), set[tuple[UsagePage, bytes]]()
        while cursors:
            async with self._calls.guard() as client:
                pipeline = client.pipeline(transaction=False)
                for page, cursor in cursors.items():
                    pipeline.hscan(page.key, cursor, count=ROWS_AT_ONCE)
                replies: list[tuple[int, dict[bytes, bytes]]] = await pipeline.execute()
            rows, left = list[UsageRow](), dict[UsagePage, int]()
            for page, (cursor, found) in zip(cursors, replies, strict=True):
                rows += [_row(page, name, words) for name, words in found.items() if (page, name) not in seen]
                if cursor:
                    left[page] = cursor
                    seen.update((page, name) for name in found)
            yield rows
            cursors = left


def _row(page: UsagePage, name: bytes, words: bytes) -> UsageRow:
    return UsageRow(page.tenant, page.day, RowName.read(name.decode()), Counts.read(words.decode()))
