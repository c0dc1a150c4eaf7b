"""Usage queries of operators, independent of the protocol."""

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
        """Return a report. Rows are added up a few at a time, and the lines are made in a thread, so that a report
        delays no tokens. Callers that render many lines must do that in a thread, too. Raises ApiError:
        INVALID_REQUEST, LIMITER_UNAVAILABLE."""
        tally = UsageTally(query, self._billing)
        async with aclosing(self._books.rows(query.tenant, query.since, query.until)) as pages:
            async for rows in pages:
                tally.add(rows)
                await asyncio.sleep(0)  # lets other tasks run
        return await asyncio.to_thread(tally.report)
