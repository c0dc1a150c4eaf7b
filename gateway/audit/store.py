"""Where the audit log is stored: a stream in Redis, which all gateways share, or the memory of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from typing import Any, NamedTuple, Protocol
from uuid import uuid4

from redis.asyncio import Redis

from gateway.registry.store import answering

FIELD = b"entry"
DAY_MS = 86_400_000
TOKEN_SECONDS = 60
"""Seconds for which Redis remembers that an entry was added. Repeats of a call after a lost connection are sooner."""
TENANTS_SHARE = 10
"""One entry of so many may be one that tenants' administrators caused, so that they cannot push out the others."""


class Retention(NamedTuple):
    """How much of the log is kept: entries of the last `days`, and no more than `entries`."""

    days: int = 365
    entries: int = 100_000

    @property
    def of_tenants(self) -> int:
        """Maximum number of entries that tenants' administrators caused."""
        return max(1, self.entries // TENANTS_SHARE)


class AuditStore(Protocol):
    """Storage of entries as bytes. Ids increase, and are `MILLISECONDS-NUMBER` of the Unix time at which the entry was
    added, by the store's clock. Every method raises StoreAway."""

    async def add(self, entry: bytes, now: float, replaces: str = "", *, of_tenant: bool = False) -> str:
        """Add an entry, in place of the one with the id `replaces` if that is given, and drop those that need not be
        kept at the Unix time `now`. `of_tenant` says that a tenant's administrator caused it. Return the new id."""

    async def older(self, than: str, count: int) -> Sequence[tuple[str, bytes]]:
        """Return up to `count` entries before the id `than` (empty: from the end), the newest first."""

    async def newer(self, than: str, count: int) -> Sequence[tuple[str, bytes]]:
        """Return up to `count` entries after the id `than`, the oldest first."""


class RedisAuditStore:
    """`AuditStore` in Redis. All keys share one hash tag, hence one slot of a cluster: the stream `{audit}` after the
    configured prefix, the list of the ids in it that tenants' administrators caused, and one short-lived key for each
    entry that was added."""

    def __init__(self, client: Redis, retention: Retention, prefix: str = "loralane:") -> None:
        self._client = client
        self._retention = retention
        self._key = f"{prefix}{{audit}}"
        script = resources.files("gateway.audit") / "add.lua"
        self._add = client.register_script(script.read_text(encoding="utf-8"))

    async def add(self, entry: bytes, now: float, replaces: str = "", *, of_tenant: bool = False) -> str:
        kept = self._retention
        oldest = f"{max(0, int(now * 1000) - kept.days * DAY_MS)}-0"
        keys = [self._key, f"{self._key}:tenants", f"{self._key}:added:{uuid4().hex}"]
        arguments: list[Any] = [entry, replaces, int(of_tenant), kept.entries, kept.of_tenants, oldest, TOKEN_SECONDS]
        async with answering():
            added: bytes = await self._add(keys, arguments)
        return added.decode()

    async def older(self, than: str, count: int) -> Sequence[tuple[str, bytes]]:
        async with answering():
            return _rows(await self._client.xrevrange(self._key, f"({than}" if than else "+", "-", count))

    async def newer(self, than: str, count: int) -> Sequence[tuple[str, bytes]]:
        async with answering():
            return _rows(await self._client.xrange(self._key, f"({than}", "+", count))


class MemoryRow(NamedTuple):
    added: float
    """Unix time in seconds."""
    place: tuple[int, int]
    entry: bytes
    of_tenant: bool

    @property
    def id(self) -> str:
        return "-".join(map(str, self.place))


class MemoryAuditStore:
    """`AuditStore` in memory, for programs without Redis."""

    def __init__(self, retention: Retention = Retention()) -> None:  # noqa: B008
        self._retention = retention
        self._rows: list[MemoryRow] = []
        self._last = (0, 0)

    async def add(self, entry: bytes, now: float, replaces: str = "", *, of_tenant: bool = False) -> str:
        self._last = (max(self._last[0], int(now * 1000)), self._last[1] + 1)
        oldest = now - self._retention.days * DAY_MS / 1000
        kept = [row for row in self._rows if row.id != replaces and row.added >= oldest]
        row = MemoryRow(now, self._last, entry, of_tenant)
        ours = [one for one in [*kept, row] if one.of_tenant]
        dropped = ours[: max(0, len(ours) - self._retention.of_tenants)]
        self._rows = [one for one in [*kept, row] if one not in dropped][-self._retention.entries :]
        return row.id

    async def older(self, than: str, count: int) -> Sequence[tuple[str, bytes]]:
        return self._chosen(reversed(self._rows), lambda place: not than or place < _place(than), count)

    async def newer(self, than: str, count: int) -> Sequence[tuple[str, bytes]]:
        return self._chosen(self._rows, lambda place: place > _place(than), count)

    def _chosen(
        self, rows: Iterable[MemoryRow], fits: Callable[[tuple[int, int]], bool], count: int
    ) -> Sequence[tuple[str, bytes]]:
        return [(row.id, row.entry) for row in rows if fits(row.place)][:count]


def _rows(found: Any) -> list[tuple[str, bytes]]:
    return [(added.decode(), fields[FIELD]) for added, fields in found if FIELD in fields]


def _place(entry_id: str) -> tuple[int, int]:
    first, _, second = entry_id.partition("-")
    return int(first), int(second or 0)
