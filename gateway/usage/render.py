"""Renders usage reports as JSON and CSV. Amounts of money are strings in both, so that no parser rounds them."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from decimal import Decimal
from io import StringIO
from typing import Any

from gateway.usage.report import UsageGroup, UsageSummary

US_PER_SECOND = 1_000_000
FIGURES = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "device_seconds")
MONEY = ("amount", "cost", "cost_per_million_tokens")


def report_json(report: UsageSummary) -> dict[str, Any]:
    lines = [line_fields(line) for line in report.lines]
    return {**report_head(report), "usage": lines, "total": line_fields(report.total)}


def report_head(report: UsageSummary) -> dict[str, Any]:
    """Return the fields of a report in JSON other than `usage` and `total`: its days, grouping and currency."""
    query = report.query
    days = {"from": query.since.isoformat(), "to": query.until.isoformat()}
    return {**days, "group_by": list(query.group_by), "currency": report.currency}


def line_fields(line: UsageGroup) -> dict[str, Any]:
    counts = line.counts
    return {
        **line.group,
        "requests": counts.requests,
        "prompt_tokens": counts.prompt_tokens,
        "cached_tokens": counts.cached_tokens,
        "completion_tokens": counts.completion_tokens,
        "device_seconds": counts.device_us / US_PER_SECOND,
        "amount": money(line.amount),
        "cost": money(line.cost),
        "cost_per_million_tokens": money(line.cost_per_million),
    }


def report_csv(report: UsageSummary) -> str:
    lines = [{**line_fields(line), "currency": report.currency} for line in report.lines]
    return csv_text(report.query.group_by, lines)


def csv_text(group_by: Sequence[str], lines: Sequence[Mapping[str, Any]]) -> str:
    """Return lines, each the fields of `line_fields` and `currency`, as CSV (RFC 4180): a header row, then one row per
    line, without the total."""
    out = StringIO()
    writer = csv.DictWriter(out, [*group_by, *FIGURES, *MONEY, "currency"], extrasaction="ignore")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def money(value: Decimal | None) -> str | None:
    """Return an amount as text without an exponent or trailing zeros: 0.15, 12, 0. None stays None."""
    if value is None:
        return None
    whole, point, rest = f"{value:f}".partition(".")
    return f"{whole}{point}{rest}".rstrip("0").rstrip(".") if point else whole
