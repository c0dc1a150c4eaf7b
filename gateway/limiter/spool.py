"""Usage of requests that were admitted without Redis: summed in memory until Redis can count it, once.

Redis counts it as usage and against the day's token limits.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import structlog

from gateway.core.usage import NOTHING, Counts, RowName, day_of
from gateway.limiter.base import ReserveRequest
from gateway.limiter.calls import Argument, RedisCalls, Script

log = structlog.get_logger("limiter.usage")

MAX_ROWS = 10_000
"""Of one tenant and day."""
MAX_SPOOLED = 50_000
"""Rows kept in memory; with so many, what is new goes to the rows that stand for others."""
MAX_BATCH = 1000
"""Rows of one call, which holds up everybody else's: some milliseconds."""
DAY_MS = 86_400_000

Place = tuple[int, RowName]
"""A day, since 1970, and a row of it."""


@dataclass(frozen=True, slots=True)
class UsageTerms:
    """How usage is written. Arguments are in the order in which the scripts read them."""

    calls: RedisCalls
    retention_days: int
    max_rows: int = MAX_ROWS

    def key(self, tenant: str, day: int) -> str:
        return self.calls.key("usage", tenant, day_of(day).isoformat())

    def expires_at(self, day: int) -> int:
        """Milliseconds since 1970 at which the usage of a day is forgotten."""
        return (day + 1 + self.retention_days) * DAY_MS

    def args(self, request: ReserveRequest, day: int, counts: Counts) -> list[Argument]:
        row = request.row
        return [str(row), str(row.others), self.max_rows, self.expires_at(day), counts.words()]


@dataclass(slots=True)
class Batch:
    """Rows on their way, the same until they have arrived: its number tells a repetition."""

    number: int = 0
    rows: Mapping[Place, Counts] = field(default_factory=dict)


class UsageSpool:
    """Every batch of a tenant is sent until Redis says that it is counted, and no other before; so each counts once."""

    def __init__(self, terms: UsageTerms) -> None:
        self._terms = terms
        self._name = secrets.token_hex(8)
        """Of this gateway's life, in Redis."""
        self._waiting: dict[str, dict[Place, Counts]] = {}
        """By tenant."""
        self._sent: dict[str, Batch] = defaultdict(Batch)
        self._turn = asyncio.Lock()
        self._script = Script.load("bucket.lua", "counted.lua", "spool.lua")
        self._size = 0

    def add(self, request: ReserveRequest, day: int, counts: Counts) -> None:
        if not counts:
            return
        rows = self._waiting.setdefault(request.tenant, {})
        place = (day, request.row)
        if place not in rows and self._size >= MAX_SPOOLED:
            place = (day, request.row.others)
        self._size += place not in rows
        rows[place] = rows.get(place, NOTHING) + counts

    @property
    def is_empty(self) -> bool:
        return not (self._waiting or any(batch.rows for batch in self._sent.values()))

    def rows(self) -> Iterator[tuple[str, Place, Counts]]:
        """What has not been counted yet, as far as is known."""
        for tenant, batch in self._sent.items():
            yield from ((tenant, place, counts) for place, counts in batch.rows.items())
        for tenant, rows in self._waiting.items():
            yield from ((tenant, place, counts) for place, counts in rows.items())

    async def deliver(self) -> None:
        """Raises StoreError: what has not arrived is kept."""
        async with self._turn:
            while not self.is_empty:
                for tenant in {*self._sent, *self._waiting}:
                    await self._deliver(tenant)

    def report_lost(self) -> None:
        """Logs what was never delivered, row by row, so that it can be told: this process ends."""
        for tenant, (day, name), counts in self.rows():
            log.error("usage_lost", tenant=tenant, day=day_of(day).isoformat(), row=str(name), counts=counts.words())

    async def _deliver(self, tenant: str) -> None:
        batch = self._sent[tenant]
        if not batch.rows:
            batch.number, batch.rows = batch.number + 1, self._take(tenant)
        if batch.rows:
            await self._send(tenant, batch)
            batch.rows = {}

    def _take(self, tenant: str) -> Mapping[Place, Counts]:
        rows = self._waiting.pop(tenant, {})
        taken = {place: rows.pop(place) for place in tuple(rows)[:MAX_BATCH]}
        self._size -= len(taken)
        if rows:
            self._waiting[tenant] = rows
        return taken

    async def _send(self, tenant: str, batch: Batch) -> None:
        terms, key = self._terms, self._terms.calls.key
        keys = [key("spooled", tenant, self._name), key("limits", tenant), key("scopes", tenant)]
        args: list[Argument] = [batch.number, terms.retention_days * DAY_MS, terms.max_rows]
        for (day, name), counts in batch.rows.items():
            scopes = ("tenant", f"key:{name.key}", f"adapter:{name.adapter}")
            keys += [terms.key(tenant, day)]
            keys += [key(kind, tenant, scope) for scope in scopes for kind in ("bucket", "running")]
            args += [str(name), str(name.others), terms.expires_at(day), counts.words(), day, name.key, name.adapter]
        await terms.calls.run(self._script, keys, args)
