"""Renders limits for the terminal: a table of what is set, and one of what is used."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from rich.table import Table

from gateway.core.limits import LIMIT_NAMES
from gateway.pb import limits_pb2 as pb

TITLES = ("requests/min", "tokens/min", "at once", "tokens/day")


def limits_table(entries: Iterable[pb.LimitEntry]) -> Table:
    """Return a table with a row for each scope. A limit in shadow, which only counts, is in brackets."""
    table = Table(box=None)
    for title in ("tenant", "scope"):
        table.add_column(title, no_wrap=True)
    for title in TITLES:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("source")
    table.add_column("while Redis is away")
    for entry in entries:
        cells = (_limit(entry.limits, name) for name in LIMIT_NAMES)
        away = ", ".join(f"{name} {policy}" for name, policy in sorted(entry.limits.when_redis_is_away.items()))
        table.add_row(entry.scope.tenant, scope_text(entry.scope), *cells, entry.source, away)
    return table


def usage_table(scopes: Iterable[pb.ScopeUsage]) -> Table:
    table = Table(box=None)
    for title in ("tenant", "scope", "limit"):
        table.add_column(title, no_wrap=True)
    for title in ("used", "of", "left", "free in", "refused today", "last refused"):
        table.add_column(title, justify="right", no_wrap=True)
    for scope in scopes:
        for limit in scope.limits:
            table.add_row(
                scope.scope.tenant, scope_text(scope.scope), *_usage_cells(limit), _refused(scope, limit.name)
            )
    return table


def scope_text(scope: pb.LimitScope) -> str:
    if scope.key:
        return f"key {scope.key}"
    return f"adapter {scope.adapter}" if scope.adapter else "all"


def _limit(limits: pb.Limits, name: str) -> str:
    if not limits.HasField(name):
        return "-"
    return f"({getattr(limits, name):,})" if name in limits.shadow else f"{getattr(limits, name):,}"


def _refused(scope: pb.ScopeUsage, name: str) -> str:
    """Return the local time of the scope's last refusal if this limit was among its causes, otherwise `-`."""
    if name not in scope.refused_by:
        return "-"
    return datetime.fromtimestamp(scope.refused_at).astimezone().strftime("%H:%M:%S")


def _usage_cells(usage: pb.LimitUsage) -> Iterable[str]:
    yield f"({usage.name})" if usage.shadow else usage.name
    yield f"{usage.used:,.0f}"
    yield f"{usage.limit:,}" if usage.HasField("limit") else "-"
    yield f"{usage.remaining:,.0f}" if usage.HasField("remaining") else "-"
    yield f"{usage.reset_seconds:,.0f} s" if usage.HasField("reset_seconds") else "-"
    yield f"{usage.refused_today:,}"
