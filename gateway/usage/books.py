"""Rows of usage, read from where settlements write them."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Protocol

from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster

from gateway.core.errors import Fault, unavailable
from gateway.core.usage import Counts, Row, RowName
from gateway.limiter.breaker import Breaker
from gateway.limiter.calls import RedisCalls, StoreError

KEY = re.compile(r"usage:\{(?P<tenant>[^}]+)\}:(?P<day>\d{4}-\d\d-\d\d)$")
AT_ONCE = 32
"""Days read in one round trip: together no more than a few megabytes."""


@dataclass(frozen=True, slots=True)
class Page:
    """One day of one tenant."""

    key: str
    tenant: str
    day: date


class UsageBooks(Protocol):
    def rows(self, tenant: str, since: date, until: date) -> AsyncGenerator[Sequence[Row], None]:
        """Of one tenant, or of all of them, a day at a time, both ends included.

        Raises:
            ApiError: LIMITER_UNAVAILABLE, Redis is away.
        """


class RedisUsageBooks:
    """`UsageBooks` with a circuit breaker of its own: a report that takes long must not keep requests from Redis."""

    def __init__(self, client: Redis | RedisCluster, *, timeout: float = 5.0, prefix: str = "loralane:") -> None:
        """`timeout`: seconds of one round trip."""
        self._calls = RedisCalls(client, prefix, timeout, Breaker(3, 1.0, time.monotonic), lambda: None)
        self._prefix = prefix

    async def rows(self, tenant: str, since: date, until: date) -> AsyncGenerator[Sequence[Row], None]:
        try:
            pages = sorted(await self._pages(tenant, since, until), key=lambda page: (page.day, page.tenant))
            for first in range(0, len(pages), AT_ONCE):
                for rows in await self._read(pages[first : first + AT_ONCE]):
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

    async def _read(self, pages: Sequence[Page]) -> list[list[Row]]:
        async with self._calls.guard() as client:
            pipeline = client.pipeline(transaction=False)
            for page in pages:
                pipeline.hgetall(page.key)
            replies: list[dict[bytes, bytes]] = await pipeline.execute()
        return [[_row(page, *field) for field in reply.items()] for page, reply in zip(pages, replies, strict=True)]


def _row(page: Page, name: bytes, words: bytes) -> Row:
    return Row(page.tenant, page.day, RowName.read(name.decode()), Counts.read(words.decode()))
