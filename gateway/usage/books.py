"""Rows of usage, read from where settlements write them."""

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
from gateway.core.usage import Counts, Row, RowName
from gateway.limiter.calls import RedisCalls, StoreError

KEY = re.compile(r"usage:\{(?P<tenant>[^}]+)\}:(?P<day>\d{4}-\d\d-\d\d)$")
PAGES_AT_ONCE, ROWS_AT_ONCE = 8, 200
"""Read in one round trip, pages and about so many rows of each: nobody's tokens wait for longer than that takes."""


@dataclass(frozen=True, slots=True)
class Page:
    """One day of one tenant."""

    key: str
    tenant: str
    day: date


class UsageBooks(Protocol):
    def rows(self, tenant: str, since: date, until: date) -> AsyncGenerator[Sequence[Row], None]:
        """Of one tenant, or of all of them, some at a time; both days are included. Those of today go on changing.

        Raises:
            ApiError: LIMITER_UNAVAILABLE, Redis is away.
        """


class RedisUsageBooks:
    """`UsageBooks` with calls of its own: a report that takes long must not keep requests from Redis."""

    def __init__(self, client: Redis | RedisCluster, *, timeout: float = 5.0, prefix: str = "loralane:") -> None:
        """`timeout`: seconds of one round trip."""
        self._calls = RedisCalls.patient(client, prefix, timeout)
        self._prefix = prefix

    async def rows(self, tenant: str, since: date, until: date) -> AsyncGenerator[Sequence[Row], None]:
        try:
            pages = sorted(await self._pages(tenant, since, until), key=lambda page: (page.day, page.tenant))
            for first in range(0, len(pages), PAGES_AT_ONCE):
                async with aclosing(self._read(pages[first : first + PAGES_AT_ONCE])) as pieces:
                    async for rows in pieces:
                        yield rows
        except StoreError as error:
            raise unavailable(Fault.LIMITER_UNAVAILABLE, "usage cannot be read while Redis is away") from error

    async def _pages(self, tenant: str, since: date, until: date) -> Collection[Page]:
        """Found by their keys: a tenant that is gone has used what it has used."""
        pattern = f"{self._prefix}usage:{{{tenant or '*'}}}:*"
        async with self._calls.guard() as client:
            keys = {key.decode() async for key in client.scan_iter(pattern, count=1000)}
        found = [(key, KEY.search(key)) for key in keys]
        pages = [Page(key, match["tenant"], date.fromisoformat(match["day"])) for key, match in found if match]
        return [page for page in pages if tenant in ("", page.tenant) and since <= page.day <= until]

    async def _read(self, pages: Sequence[Page]) -> AsyncGenerator[list[Row], None]:
        """Piece by piece. A row that is met twice, as happens while a hash grows, is told once."""
        cursors, seen = dict.fromkeys(pages, 0), set[tuple[Page, bytes]]()
        while cursors:
            async with self._calls.guard() as client:
                pipeline = client.pipeline(transaction=False)
                for page, cursor in cursors.items():
                    pipeline.hscan(page.key, cursor, count=ROWS_AT_ONCE)
                replies: list[tuple[int, dict[bytes, bytes]]] = await pipeline.execute()
            rows, left = list[Row](), dict[Page, int]()
            for page, (cursor, found) in zip(cursors, replies, strict=True):
                rows += [_row(page, name, words) for name, words in found.items() if (page, name) not in seen]
                if cursor:
                    left[page] = cursor
                    seen.update((page, name) for name in found)
            yield rows
            cursors = left


def _row(page: Page, name: bytes, words: bytes) -> Row:
    return Row(page.tenant, page.day, RowName.read(name.decode()), Counts.read(words.decode()))
