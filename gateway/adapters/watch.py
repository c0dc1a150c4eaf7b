"""Watches the status of adapters: first the whole list, then the changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Hashable, Mapping
from dataclasses import dataclass

from gateway.adapters.registry import AdapterRegistry
from gateway.adapters.status import AdapterStatus


@dataclass(frozen=True, slots=True)
class AdapterChanges:
    """Differences between two polls of the adapters' status: `adapters` are new or changed, `removed` are gone."""

    adapters: tuple[AdapterStatus, ...]
    """Adapters that are new or changed, in their present state."""
    removed: tuple[str, ...]


async def watch(
    registry: AdapterRegistry, interval_seconds: float, stopping: asyncio.Event
) -> AsyncGenerator[AdapterChanges, None]:
    """Yield all adapters at first, even if there are none, then changes of record, tier, served version or error, until
    `stopping` is set. The engine is polled every `interval_seconds`, and at once when the registry has changed."""
    before: dict[str, AdapterStatus] = {}
    first = True
    while not stopping.is_set():
        change = registry.next_change  # fetched before the statuses, so that no change is missed
        now = {status.name: status for status in await registry.statuses()}
        difference = _difference(before, now)
        if first or difference.adapters or difference.removed:
            yield difference
        first, before = False, now
        await _any_of(change, stopping, within=interval_seconds)


async def _any_of(*events: asyncio.Event, within: float) -> None:
    tasks = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, timeout=within, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _difference(before: Mapping[str, AdapterStatus], now: Mapping[str, AdapterStatus]) -> AdapterChanges:
    changed = [status for name, status in now.items() if name not in before or _news(before[name]) != _news(status)]
    return AdapterChanges(tuple(changed), tuple(sorted(before.keys() - now.keys())))


def _news(status: AdapterStatus) -> Hashable:
    """Return the fields whose change is reported, for comparison. Counts and times change with every request."""
    return status.generation, status.tier, status.served_version, status.error
