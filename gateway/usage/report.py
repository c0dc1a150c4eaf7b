"""A question about usage, and its answer: rows that fit, summed by what one asks to tell apart, and priced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from decimal import Decimal
from fnmatch import fnmatchcase
from typing import Literal, get_args

from gateway.core.billing import BillingConfig, LaneName
from gateway.core.errors import invalid_request
from gateway.core.usage import NOTHING, Counts, Row, today

Dimension = Literal["tenant", "key", "adapter", "lane", "day"]
DIMENSIONS: tuple[Dimension, ...] = get_args(Dimension)
LANES: tuple[LaneName, ...] = get_args(LaneName)
DEFAULT_GROUPS: tuple[Dimension, ...] = ("tenant", "adapter", "lane")
MAX_LINES = 100_000
"""Of one report: about what a spreadsheet opens."""


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """Empty: all of them."""

    since: date
    until: date
    """The last day, included."""
    tenant: str = ""
    key: str = ""
    """An id."""
    adapter: str = ""
    """A shell-style pattern."""
    lane: str = ""
    group_by: tuple[Dimension, ...] = DEFAULT_GROUPS
    """What lines are told apart by; nothing: one line for everything."""

    def wants(self, row: Row) -> bool:
        name = row.name
        adapter_fits = not self.adapter or fnmatchcase(name.adapter, self.adapter)
        return adapter_fits and self.key in ("", name.key) and self.lane in ("", name.lane)


@dataclass(frozen=True, slots=True)
class UsageLine:
    """What some rows come to."""

    group: Mapping[str, str]
    """Of the dimensions asked for: their values; days as YYYY-MM-DD."""
    counts: Counts
    amount: Decimal | None
    """What its tokens are sold for; None: there are no prices."""
    cost: Decimal | None
    """What its device time costs; None: nobody knows."""
    cost_per_million: Decimal | None
    """Of tokens, prompts and completions alike."""


@dataclass(frozen=True, slots=True)
class UsageReport:
    query: UsageQuery
    currency: str
    lines: tuple[UsageLine, ...]
    """In the order of what they are told apart by."""
    total: UsageLine


@dataclass(slots=True)
class Sum:
    counts: Counts = NOTHING
    amount: Decimal = field(default_factory=Decimal)

    def add(self, counts: Counts, amount: Decimal | None) -> None:
        self.counts += counts
        self.amount += amount or 0


class UsageTally:
    """Adds rows up, one after another."""

    def __init__(self, query: UsageQuery, billing: BillingConfig) -> None:
        self._query = query
        self._billing = billing
        self._sums: dict[tuple[str, ...], Sum] = {}

    def add(self, rows: Sequence[Row]) -> None:
        """Raises ApiError: INVALID_REQUEST, the report would be too long."""
        for row in rows:
            if row.counts and self._query.wants(row):
                group = tuple(_value(row, name) for name in self._query.group_by)
                self._sums.setdefault(group, Sum()).add(row.counts, self._billing.amount(row))
        if len(self._sums) > MAX_LINES:
            message = f"more than {MAX_LINES} lines: ask for fewer days, or tell less apart"
            raise invalid_request(message, "group_by")

    def report(self) -> UsageReport:
        names, total = self._query.group_by, Sum()
        for one in self._sums.values():
            total.add(one.counts, one.amount)
        lines = tuple(
            self._line(dict(zip(names, group, strict=True)), one) for group, one in sorted(self._sums.items())
        )
        return UsageReport(self._query, self._billing.currency, lines, self._line({}, total))

    def _line(self, group: Mapping[str, str], one: Sum) -> UsageLine:
        billing, counts = self._billing, one.counts
        amount = one.amount if billing.prices else None
        return UsageLine(group, counts, amount, billing.cost(counts.device_us), billing.cost_per_million(counts))


def parse_query(given: Mapping[str, str]) -> UsageQuery:
    """From texts by the names tenant, key, adapter, lane, from, to and group_by; absent or empty ones have defaults.

    Without `from`, the month of `to`; without `to`, today.

    Raises:
        ApiError: INVALID_REQUEST, blaming one of them.
    """
    until = _day(given, "to") or today()
    since = _day(given, "from") or until.replace(day=1)
    if since > until:
        raise invalid_request(f"from ({since}) must not be after to ({until})", "from")
    lane = given.get("lane", "")
    if lane not in ("", *LANES):
        raise invalid_request(f"lane must be one of {', '.join(LANES)}, not {lane!r}", "lane")
    exact = {name: given.get(name, "") for name in ("tenant", "key", "adapter")}
    return UsageQuery(since, until, **exact, lane=lane, group_by=_groups(given.get("group_by")))


def _day(given: Mapping[str, str], name: str) -> date | None:
    text = given.get(name)
    if not text:
        return None
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        raise invalid_request(f"{name} must be a day as YYYY-MM-DD, not {text!r}", name) from error


def _groups(text: str | None) -> tuple[Dimension, ...]:
    if not text:
        return DEFAULT_GROUPS
    names = [] if text == "none" else text.split(",")
    unknown = [name for name in names if name not in DIMENSIONS]
    if unknown or len(set(names)) < len(names):
        raise invalid_request(f"group_by must be none, or some of {','.join(DIMENSIONS)}, each once", "group_by")
    return tuple(name for name in DIMENSIONS if name in names) if names else ()


def _value(row: Row, name: Dimension) -> str:
    if name == "tenant":
        return row.tenant
    return row.day.isoformat() if name == "day" else str(getattr(row.name, name))
