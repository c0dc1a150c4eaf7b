"""Where the audit log is stored: a stream in Redis, which all gateways share, or the memory of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from redis.asyncio import Redis

from gateway.registry.store import answering

FIELD = b"entry"
DAY_MS = 86_400_000


class Retention(NamedTuple):
    """How much of the log is kept: entries of the last `days`, and no more than `entries`."""

    days: int = 365
    entries: int = 100_000


class AuditStore(Protocol):
    """Storage of entries as bytes, by ids that increase. Every method raises StoreAway."""

    async def add(self, entry: bytes, now: float, replaces: str = "") -> str:
        """Add an entry, in place of the one with the id `replaces` if that is given, and drop those that need not be
        kept at the Unix time `now`. Return the new id."""

    async def older(self, than: str, count: int) -> Sequence[tuple[str, bytes]]:
        """Return up to `count` entries before the id `than` (empty: from the end), the newest first."""

    async def newer(self, than: str, count: int) -> Sequence[tuple[str, bytes]]:
        """Return up to `count` entries after the id `than`, the oldest first."""


class RedisAuditStore:
    """`AuditStore` in a stream of Redis: the key `audit` after the configured prefix."""

    def __init__(self, client: Redis, retention: Retention, prefix: str = "loralane:") -> None:
        self._client = client
        self._retention = retention
        self._key = f"{prefix}audit"

    async def add(self, entry: bytes, now: float, replaces: str = "") -> str:
        oldest = f"{max(0, int(now * 1000) - self._retention.days * DAY_MS)}-0"
        async with answering(), self._client.pipeline(transaction=True) as pipe:
            pipe.xadd(self._key, {FIELD: entry})
            if replaces:
                pipe.xdel(self._key, replaces)
            pipe.xtrim(self._key, maxlen=self._retention.entries, approximate=False)
            pipe.xtrim(self._key, minid=oldest, approximate=False)
            added: bytes = (await pipe.execute())[0]
        return added.decode()

    async def older(self, than: str, count: int) -> Sequence[tuple[str, bytes]]:
        async with answering():
            return _rows(await self._client.xrevrange(self._key, f"({than}" if than else "+", "-", count))

    async def newer(self, than: str, count: int) -> Sequence[tuple[str, bytes]]:
        async with answering():
            return _rows(await self._client.xrange(self._key, f"({than}", "+", count))


class MemoryAuditStore:
    """`AuditStore` in memory, for programs without Redis."""

    def __init__(self, retention: Retention = Retention()) -> None:  # noqa: B008
        self._retention = retention
        self._rows: list[tuple[float, str, bytes]] = []
        self._count = 0

    async def add(self, entry: bytes, now: float, replaces: str = "") -> str:
        self._count += 1
        oldest = now - self._retention.days * DAY_MS / 1000
        kept = [row for row in self._rows if row[1] != replaces and row[0] >= oldest]
        added = f"{self._count}-0"
        self._rows = [*kept, (now, added, entry)][-self._retention.entries :]
        return added

    async def older(self, than: str, count: int) -> Sequence[tuple[str, bytes]]:
        return self._chosen(reversed(self._rows), lambda place: not than or place < _place(than), count)

    async def newer(self, than: str, count: int) -> Sequence[tuple[str, bytes]]:
        return self._chosen(self._rows, lambda place: place > _place(than), count)

    def _chosen(self, rows: Any, fits: Callable[[tuple[int, int]], bool], count: int) -> Sequence[tuple[str, bytes]]:
        return [(added, entry) for _, added, entry in rows if fits(_place(added))][:count]


def _rows(found: Any) -> list[tuple[str, bytes]]:
    return [(added.decode(), fields[FIELD]) for added, fields in found if FIELD in fields]


def _place(entry_id: str) -> tuple[int, int]:
    first, _, second = entry_id.partition("-")
    return int(first), int(second or 0)
