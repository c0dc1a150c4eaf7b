"""Renders adapters for the terminal: a table of many, all fields of one, or JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from enum import StrEnum
from fnmatch import fnmatchcase
from math import inf
from typing import Any

from rich.table import Table
from rich.text import Text

from gateway.outputs import message_json
from gateway.pb import adapters_pb2 as pb

TIERS = ("disk", "fetching", "host", "resident")
VERSION_CHARS = 12


class SortKey(StrEnum):
    """Sort keys of `adapters ls`. Names and tiers ascend, numbers descend, and last use puts the most recent first."""

    name = "name"
    tier = "tier"
    rank = "rank"
    bytes = "bytes"
    pages = "pages"
    running = "running"
    waiting = "waiting"
    hits = "hits"
    loads = "loads"
    load_ms = "load-ms"
    last_use = "last-use"


ORDERS: dict[SortKey, Callable[[pb.Adapter], Any]] = {
    SortKey.name: lambda adapter: adapter.name,
    SortKey.tier: lambda adapter: TIERS.index(adapter.tier),
    SortKey.rank: lambda adapter: -adapter.rank,
    SortKey.bytes: lambda adapter: -adapter.bytes,
    SortKey.pages: lambda adapter: -adapter.pages,
    SortKey.running: lambda adapter: -adapter.running,
    SortKey.waiting: lambda adapter: -adapter.waiting,
    SortKey.hits: lambda adapter: -adapter.hits,
    SortKey.loads: lambda adapter: -adapter.loads,
    SortKey.load_ms: lambda adapter: -adapter.last_load_seconds,
    SortKey.last_use: lambda adapter: adapter.idle_seconds if adapter.HasField("idle_seconds") else inf,
}


def chosen(adapters: Iterable[pb.Adapter], pattern: str, tier: str | None, sort: SortKey) -> list[pb.Adapter]:
    """Return the adapters whose name or an alias matches the shell pattern, sorted; a `tier` of None means any tier."""
    found = [
        adapter
        for adapter in adapters
        if tier in (None, adapter.tier) and any(fnmatchcase(name, pattern) for name in (adapter.name, *adapter.aliases))
    ]
    return sorted(found, key=lambda adapter: (ORDERS[sort](adapter), adapter.name))


def adapter_table(adapters: Iterable[pb.Adapter]) -> Table:
    table = Table(box=None)
    for title in ("name", "aliases", "tier", "version"):
        table.add_column(title, no_wrap=True)
    for title in ("rank", "MB", "pages", "running", "waiting", "hits", "loads", "load ms", "last use"):
        table.add_column(title, justify="right", no_wrap=True)
    for adapter in adapters:
        table.add_row(*_cells(adapter))
    return table


def adapter_facts(adapter: pb.Adapter) -> Table:
    """Return a table of all fields of one adapter, one a row."""
    table = Table.grid(padding=(0, 2))
    for name, value in adapter_json(adapter).items():
        table.add_row(Text(name, style="dim"), Text(_fact(name, value)))
    return table


def adapter_json(adapter: pb.Adapter) -> dict[str, Any]:
    """Return all fields of an adapter, named as in the HTTP API."""
    return message_json(adapter)


def _cells(adapter: pb.Adapter) -> Iterable[Text | str]:
    yield Text(adapter.name, style="red" if adapter.error else "")
    yield ", ".join(adapter.aliases)
    yield f"{adapter.tier}, pinned" if adapter.pinned else adapter.tier
    yield adapter.version[:VERSION_CHARS]
    yield str(adapter.rank)
    yield f"{adapter.bytes / 1e6:.1f}"
    for count in (adapter.pages, adapter.running, adapter.waiting, adapter.hits, adapter.loads):
        yield str(count)
    yield f"{adapter.last_load_seconds * 1000:.1f}" if adapter.last_load_seconds else "-"
    yield _ago(adapter.idle_seconds) if adapter.HasField("idle_seconds") else "never"


def _ago(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _fact(name: str, value: Any) -> str:
    if name in ("created", "updated"):
        return datetime.fromtimestamp(value).astimezone().isoformat(timespec="seconds")
    return ", ".join(value) if isinstance(value, list) else "-" if value in (None, "") else str(value)
