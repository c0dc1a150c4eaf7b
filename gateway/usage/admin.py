"""What operators ask about usage, in words both protocols translate to."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from gateway.core.billing import BillingConfig
from gateway.usage.books import UsageBooks
from gateway.usage.last_minute import LastMinute
from gateway.usage.report import UsageQuery, UsageReport, UsageTally


class UsageAdmin:
    def __init__(self, books: UsageBooks, billing: BillingConfig) -> None:
        self._books = books
        self._billing = billing
        self.last_minute = LastMinute(books)

    async def report(self, query: UsageQuery) -> UsageReport:
        """Rows are added up a few at a time and lines made in a thread, in which whoever writes many of them down has
        to do that, too: nobody's tokens wait for a report. Raises ApiError: INVALID_REQUEST, LIMITER_UNAVAILABLE."""
        tally = UsageTally(query, self._billing)
        async with aclosing(self._books.rows(query.tenant, query.since, query.until)) as pages:
            async for rows in pages:
                tally.add(rows)
                await asyncio.sleep(0)  # lets others have a turn
        return await asyncio.to_thread(tally.report)
