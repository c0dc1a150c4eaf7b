"""Watches the status of adapters: first the whole list, then the changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Hashable, Mapping
from dataclasses import dataclass

from gateway.adapters.admin import AdapterAdmin
from gateway.api_schema.adapters import AdapterStatus

Statuses = Mapping[tuple[str, str], AdapterStatus]
"""Statuses by the names of the adapter and its base model."""


@dataclass(frozen=True, slots=True)
class AdapterChanges:
    """Differences between two polls of the adapters' status: `adapters` are new or changed, `removed` are gone."""

    adapters: tuple[AdapterStatus, ...]
    """Adapters that are new or changed, in their present state."""
    removed: tuple[str, ...]


async def watch(
    adapters: AdapterAdmin, interval_seconds: float, stopping: asyncio.Event, check: Callable[[], None]
) -> AsyncGenerator[AdapterChanges, None]:
    """Yield all adapters at first, even if there are none, then changes of record, tier, served version or error, until
    `stopping` is set. The engine is polled every `interval_seconds`, and at once when a registry has changed. `check`
    is called before each poll, and raises ApiError if the caller must not watch any longer."""
    before: Statuses = {}
    first = True
    while not stopping.is_set():
        check()
        changes = adapters.next_changes  # fetched before the statuses, so that no change is missed
        now = {(status.name, status.base_model): status for status in await adapters.statuses()}
        difference = _difference(before, now)
        if first or difference.adapters or difference.removed:
            yield difference
        first, before = False, now
        await _any_of(*changes, stopping, within=interval_seconds)


async def _any_of(*events: asyncio.Event, within: float) -> None:
    tasks = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, timeout=within, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _difference(before: Statuses, now: Statuses) -> AdapterChanges:
    changed = [status for key, status in now.items() if key not in before or _news(before[key]) != _news(status)]
    gone = {name for name, _ in before} - {name for name, _ in now}
    return AdapterChanges(tuple(changed), tuple(sorted(gone)))


def _news(status: AdapterStatus) -> Hashable:
    """Return the fields of a status whose changes `watch` reports, to compare two polls by. Counts and times are not
    among them, because they change with every request."""
    return status.generation, status.tier, status.served_version, status.error
