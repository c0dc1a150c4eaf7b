"""Usage of requests that were admitted without Redis. It is summed in memory until Redis can count it, exactly once,
both as usage and against the day's token limits."""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import structlog

from gateway.core.usage import NOTHING, Counts, RowKey, day_of
from gateway.limiter.base import ReserveRequest
from gateway.redis.client import Argument, RedisCalls, Script

log = structlog.get_logger("limiter.usage")

MAX_ROWS = 10_000
"""Maximum number of usage rows of one tenant and day."""
MAX_SPOOLED = 50_000
"""Maximum number of rows in memory. Beyond it, usage for which there is no row yet is added to the row
`RowName.others`."""
MAX_BATCH = 1000
"""Maximum number of rows in one call. The script blocks all other calls to Redis, for some milliseconds."""
DAY_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class UsageTerms:
    """Keys and script arguments for writing usage rows, which expire after `retention_days`. Arguments are in the order
    in which the scripts read them."""

    calls: RedisCalls
    retention_days: int
    max_rows: int = MAX_ROWS

    def key(self, tenant: str, day: int) -> str:
        return self.calls.key("usage", tenant, day_of(day).isoformat())

    def expires_at(self, day: int) -> int:
        """Return the Unix time in milliseconds at which the usage of a day expires."""
        return (day + 1 + self.retention_days) * DAY_MS

    def args(self, request: ReserveRequest, day: int, counts: Counts) -> list[Argument]:
        row = request.row
        return [str(row), str(row.others), self.max_rows, self.expires_at(day), counts.encoded()]

    def rows(self, tenant: str, rows: Mapping[RowKey, Counts]) -> tuple[list[str], list[Argument]]:
        """Return the keys and the script arguments with which `rows.lua` counts rows of one tenant, and their tokens
        against the limits of their day. They are the last ones of the script that calls it."""
        key = self.calls.key
        keys, args = [key("limits", tenant), key("scopes", tenant)], list[Argument]([self.max_rows])
        for (day, name), counts in rows.items():
            scopes = ("tenant", f"key:{name.key}", f"adapter:{name.adapter}")
            keys += [self.key(tenant, day)]
            keys += [key(kind, tenant, scope) for scope in scopes for kind in ("bucket", "running")]
            args += [str(name), str(name.others), self.expires_at(day), counts.encoded(), day, name.key, name.adapter]
        return keys, args


COUNT_ROWS = Script.load("bucket.lua", "counted.lua", "rows.lua")
"""Beginning of the scripts that count usage rows (see `UsageTerms.rows`)."""


@dataclass(slots=True)
class SpoolBatch:
    """Usage rows of one tenant that are being delivered; they stay unchanged until Redis has counted them. Redis
    recognizes a repeated batch by its number."""

    number: int = 0
    rows: Mapping[RowKey, Counts] = field(default_factory=dict)


class UsageSpool:
    """Usage in memory that waits for delivery to Redis. Each batch of a tenant is sent until Redis confirms that it is
    counted, and only then the next one, so that each batch counts exactly once."""

    def __init__(self, terms: UsageTerms) -> None:
        self._terms = terms
        self._name = secrets.token_hex(8)
        """Random name of this gateway process, under which Redis stores the number of its last batch."""
        self._waiting: dict[str, dict[RowKey, Counts]] = {}
        """Rows that are not in a batch yet, by tenant."""
        self._sent: dict[str, SpoolBatch] = defaultdict(SpoolBatch)
        self._turn = asyncio.Lock()
        self._script = COUNT_ROWS + Script.load("spool.lua")
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

    def rows(self) -> Iterator[tuple[str, RowKey, Counts]]:
        """Yield tenant, key (day and name) and counts of every row that is not known to be counted in Redis."""
        for tenant, batch in self._sent.items():
            yield from ((tenant, place, counts) for place, counts in batch.rows.items())
        for tenant, rows in self._waiting.items():
            yield from ((tenant, place, counts) for place, counts in rows.items())

    async def deliver(self) -> None:
        """Send all rows to Redis, until the spool is empty. Raises StoreError; undelivered rows then stay in memory."""
        async with self._turn:
            while not self.is_empty:
                for tenant in {*self._sent, *self._waiting}:
                    await self._deliver(tenant)

    def report_lost(self) -> int:
        """Log every row that was not delivered as lost; returns their tokens. Call this when the process is about to
        end."""
        lost = 0
        for tenant, (day, name), counts in self.rows():
            lost += counts.tokens
            log.error("usage_lost", tenant=tenant, day=day_of(day).isoformat(), row=str(name), counts=counts.encoded())
        return lost

    async def _deliver(self, tenant: str) -> None:
        batch = self._sent[tenant]
        if not batch.rows:
            batch.number, batch.rows = batch.number + 1, self._take(tenant)
        if batch.rows:
            await self._send(tenant, batch)
            batch.rows = {}

    def _take(self, tenant: str) -> Mapping[RowKey, Counts]:
        rows = self._waiting.pop(tenant, {})
        taken = {place: rows.pop(place) for place in tuple(rows)[:MAX_BATCH]}
        self._size -= len(taken)
        if rows:
            self._waiting[tenant] = rows
        return taken

    async def _send(self, tenant: str, batch: SpoolBatch) -> None:
        terms = self._terms
        keys, args = terms.rows(tenant, batch.rows)
        receipt = terms.calls.key("spooled", tenant, self._name)
        options: list[Argument] = [batch.number, terms.retention_days * DAY_MS]
        await terms.calls.run(self._script, [receipt, *keys], [*options, *args])
