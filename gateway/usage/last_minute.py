"""Computes each tenant's usage today and in the last minute from the usage books that all gateways write to.

The books count per day. The difference of two readings about a minute apart is the usage in between. A gateway process
reads them only while an operator watches, so the first reading gives only the usage of today.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import aclosing
from datetime import date, timedelta

from gateway.api_schema.limits import TenantUsed, Used
from gateway.core.usage import NOTHING, Counts, today
from gateway.usage.books import UsageBooks

WINDOW_SECONDS = 60.0
MAX_WINDOW_SECONDS = 1.5 * WINDOW_SECONDS
"""Maximum age in seconds of the reading with which a new one is compared, so that the difference is not of hours."""

Totals = Mapping[tuple[str, date], Counts]
"""Counts of yesterday and today, by tenant and day."""


class LastMinute:
    """Computes recent usage from readings of the usage books. Each gateway process has one object, which holds the
    readings."""

    def __init__(self, books: UsageBooks, clock: Callable[[], float] = time.monotonic) -> None:
        self._books = books
        self._clock = clock
        self._looks: deque[tuple[float, Totals]] = deque()

    async def read(self) -> Mapping[str, TenantUsed]:
        """Read the usage books, and return each tenant's usage of today and since a reading about a minute ago, by
        tenant. For the first reading, the latter is zero. Tenants without rows of today or yesterday are missing.
        Raises ApiError (LIMITER_UNAVAILABLE) if Redis is away."""
        totals, now = await self._totals(), self._clock()
        while self._looks and self._is_spare(now):
            self._looks.popleft()
        since, before = self._looks[0] if self._looks else (now, totals)
        self._looks.append((now, totals))
        window, day = round(now - since, 1), today()
        of_today = {tenant: counts for (tenant, counted), counts in totals.items() if counted == day}
        recently: dict[str, Counts] = {}
        for place, counts in totals.items():
            recently[place[0]] = recently.get(place[0], NOTHING) + _growth(counts, before.get(place, NOTHING))
        return {
            tenant: TenantUsed(_used(of_today.get(tenant, NOTHING)), _used(grown), window)
            for tenant, grown in recently.items()
        }

    def _is_spare(self, now: float) -> bool:
        """Return whether to drop the oldest reading: the next one is at least a minute old, or the oldest is older than
        MAX_WINDOW_SECONDS."""
        later_reaches = len(self._looks) > 1 and self._looks[1][0] <= now - WINDOW_SECONDS
        return later_reaches or self._looks[0][0] < now - MAX_WINDOW_SECONDS

    async def _totals(self) -> Totals:
        """Read the counts of today, and those of yesterday, which requests that run across midnight still change."""
        day, totals = today(), dict[tuple[str, date], Counts]()
        async with aclosing(self._books.rows("", day - timedelta(days=1), day)) as pages:
            async for rows in pages:
                for row in rows:
                    place = row.tenant, row.day
                    totals[place] = totals.get(place, NOTHING) + row.counts
        return totals


def _used(counts: Counts) -> Used:
    return Used(counts.requests, counts.tokens)


def _growth(now: Counts, before: Counts) -> Counts:
    """Return the increase of each count from `before` to `now`. A decrease, caused by refunds, counts as zero."""
    pairs = zip(now.numbers, before.numbers, strict=True)
    return Counts(*(max(0, later - earlier) for later, earlier in pairs))
