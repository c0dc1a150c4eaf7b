"""Usage queries of operators and their reports: matching rows are summed by the requested dimensions, and priced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from datetime import date
from decimal import Decimal
from fnmatch import fnmatchcase
from typing import get_args

from gateway.api_schema.usage import DEFAULT_GROUPS, DIMENSIONS, NO_GROUPS, Dimension
from gateway.core.billing import BillingConfig
from gateway.core.errors import invalid_request
from gateway.core.lanes import LaneName
from gateway.core.usage import NOTHING, Counts, UsageRow, today
from gateway.usage.books import UsageBooks
from gateway.usage.last_minute import LastMinute

LANES: tuple[LaneName, ...] = get_args(LaneName)
MAX_LINES = 100_000
"""Maximum number of lines of a report. It is about the number of rows that a spreadsheet opens."""
ROWS_AT_ONCE = 200
"""Maximum number of rows that are added up without a pause: 3 ms."""
MOST_PATTERN = 256
"""Maximum characters of a pattern for names of adapters, which is compiled."""


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """Filters and grouping of a usage report on the days from `since` to `until` (UTC, both inclusive). An empty filter
    matches everything; `adapter` is a shell-style pattern."""

    since: date
    until: date
    """Last day of the report, inclusive."""
    tenant: str = ""
    key: str = ""
    """Id of an API key."""
    adapter: str = ""
    """Shell-style pattern for the name of the adapter or base model."""
    lane: str = ""
    group_by: tuple[Dimension, ...] = DEFAULT_GROUPS
    """Dimensions by which rows are grouped into lines. An empty tuple gives one line for everything."""

    def wants(self, row: UsageRow) -> bool:
        name = row.name
        adapter_fits = not self.adapter or fnmatchcase(name.adapter, self.adapter)
        return adapter_fits and self.key in ("", name.key) and self.lane in ("", name.lane)


@dataclass(frozen=True, slots=True)
class UsageGroup:
    """One line of a report: the sum of all rows with the same values of the requested dimensions."""

    group: Mapping[str, str]
    """Value of each requested dimension by its name; days as YYYY-MM-DD."""
    counts: Counts
    amount: Decimal | None
    """Price of the tokens in the report's currency. None means that no prices are configured."""
    cost: Decimal | None
    """Cost of the device time, in the report's currency. None means that no cost per device hour is configured."""
    cost_per_million: Decimal | None
    """Cost of the device time per million tokens, prompt and completion alike. None means no `cost` or no tokens."""


@dataclass(frozen=True, slots=True)
class UsageSummary:
    query: UsageQuery
    currency: str
    lines: tuple[UsageGroup, ...]
    """Lines sorted by the values of their dimensions."""
    total: UsageGroup


@dataclass(slots=True)
class UsageSum:
    counts: Counts = NOTHING
    amount: Decimal = field(default_factory=Decimal)

    def add(self, counts: Counts, amount: Decimal | None) -> None:
        self.counts += counts
        self.amount += amount or 0


class UsageTally:
    """Sums rows for one query and makes the report."""

    def __init__(self, query: UsageQuery, billing: BillingConfig) -> None:
        self._query = query
        self._billing = billing
        self._sums: dict[tuple[str, ...], UsageSum] = {}

    def add(self, rows: Sequence[UsageRow]) -> None:
        """Add the rows that match the query's adapter, key and lane; the caller selects tenant and days. Raises
        ApiError (INVALID_REQUEST) if the report exceeds MAX_LINES lines."""
        for row in rows:
            if row.counts and self._query.wants(row):
                group = tuple(_value(row, name) for name in self._query.group_by)
                self._sums.setdefault(group, UsageSum()).add(row.counts, self._billing.amount(row))
        if len(self._sums) > MAX_LINES:
            message = f"more than {MAX_LINES} lines: ask for fewer days, or tell less apart"
            raise invalid_request(message, "group_by")

    def report(self) -> UsageSummary:
        names, total = self._query.group_by, UsageSum()
        for subtotal in self._sums.values():
            total.add(subtotal.counts, subtotal.amount)
        lines = tuple(
            self._group(dict(zip(names, group, strict=True)), subtotal)
            for group, subtotal in sorted(self._sums.items())
        )
        return UsageSummary(self._query, self._billing.currency, lines, self._group({}, total))

    def _group(self, group: Mapping[str, str], subtotal: UsageSum) -> UsageGroup:
        billing, counts = self._billing, subtotal.counts
        amount = subtotal.amount if billing.prices else None
        return UsageGroup(group, counts, amount, billing.cost(counts.device_us), billing.cost_per_million(counts))


def parse_query(given: Mapping[str, str]) -> UsageQuery:
    """Return the query given by the parameters tenant, key, adapter, lane, from, to and group_by. Absent or empty ones
    have defaults: `to` is today (UTC), `from` the first day of the month of `to`, `group_by` tenant,adapter,lane
    (`none` gives one line). Other names are ignored.

    Raises ApiError (INVALID_REQUEST) that names the invalid parameter.
    """
    until = _day(given, "to") or today()
    since = _day(given, "from") or until.replace(day=1)
    if since > until:
        raise invalid_request(f"from ({since}) must not be after to ({until})", "from")
    lane = given.get("lane", "")
    if lane not in ("", *LANES):
        raise invalid_request(f"lane must be one of {', '.join(LANES)}, not {lane[:80]!r}", "lane")
    if len(given.get("adapter", "")) > MOST_PATTERN:
        raise invalid_request(f"adapter must have at most {MOST_PATTERN} characters", "adapter")
    exact = {name: given.get(name, "") for name in ("tenant", "key", "adapter")}
    return UsageQuery(since, until, **exact, lane=lane, group_by=_groups(given.get("group_by")))


def _day(given: Mapping[str, str], name: str) -> date | None:
    text = given.get(name)
    if not text:
        return None
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        raise invalid_request(f"{name} must be a day as YYYY-MM-DD, not {text[:80]!r}", name) from error


def _groups(text: str | None) -> tuple[Dimension, ...]:
    if not text:
        return DEFAULT_GROUPS
    names = [] if text == NO_GROUPS else text.split(",")
    unknown = [name for name in names if name not in DIMENSIONS]
    if unknown or len(set(names)) < len(names):
        raise invalid_request(f"group_by must be none, or some of {','.join(DIMENSIONS)}, each once", "group_by")
    return tuple(name for name in DIMENSIONS if name in names) if names else ()


def _value(row: UsageRow, name: Dimension) -> str:
    if name == "tenant":
        return row.tenant
    return row.day.isoformat() if name == "day" else str(getattr(row.name, name))


class UsageAdmin:
    def __init__(self, books: UsageBooks, billing: BillingConfig, counts_as: Callable[[str], str] = str) -> None:
        """`counts_as` returns the id under which the usage of the key with a given id is kept. The default is for keys
        that are never rotated."""
        self._books = books
        self._billing = billing
        self._counts_as = counts_as
        self.last_minute = LastMinute(books)

    async def report(self, query: UsageQuery) -> UsageSummary:
        """Return the report of the rows that the query asks for. It is made in a thread; callers that render many lines
        must do that in one, too. Raises ApiError: INVALID_REQUEST (more than MAX_LINES lines), LIMITER_UNAVAILABLE."""
        tally = UsageTally(replace(query, key=self._counts_as(query.key)), self._billing)
        async with aclosing(self._books.rows(query.tenant, query.since, query.until)) as pages:
            async for rows in pages:
                for start in range(0, len(rows), ROWS_AT_ONCE):
                    tally.add(rows[start : start + ROWS_AT_ONCE])
                    await asyncio.sleep(0)  # lets other tasks run
        return await asyncio.to_thread(tally.report)
