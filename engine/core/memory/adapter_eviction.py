"""The eviction of adapters: what keeping one is worth on the device and in host memory, and the orders and totals over
all of them, updated incrementally, so that a plan need not scan thousands of adapters. An adapter's worth changes only
when the adapter itself changes (see `Adapter.start`)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from math import log2
from typing import NamedTuple

from engine.core.memory.adapters import Adapter, HostCopy
from engine.core.messages.requests import AdapterHash

COPY_BYTES_PER_S = 10e9
DISK_BYTES_PER_S = 500e6
"""Assumed rates of copies to the device and of reads from disk, used for an adapter until one of its own was timed: the
orders of magnitude of memory and of an SSD."""


def worth_on_device(adapter: Adapter) -> float:
    """Return log2 of (weighted number of starts * seconds of a reload / pages): what keeping an adapter on the device
    saves. The adapter with the lowest value is evicted first. A reload includes the read from disk if the adapter is
    not in host memory."""
    cost = adapter.load_seconds or adapter.num_bytes / COPY_BYTES_PER_S
    if adapter.host is not HostCopy.PRESENT:
        cost += _fetch_cost(adapter)
    return adapter.popularity + log2(max(cost, 1e-9) / adapter.num_pages)


def worth_in_host(adapter: Adapter) -> float:
    """Return log2 of (weighted number of starts * seconds of a fetch / bytes): what keeping an adapter in host memory
    saves. The host copy with the lowest value is freed first."""
    return adapter.popularity + log2(max(_fetch_cost(adapter), 1e-9) / max(adapter.num_bytes, 1))


def _fetch_cost(adapter: Adapter) -> float:
    return adapter.fetch_seconds or adapter.num_bytes / DISK_BYTES_PER_S


class Ranking:
    """A set of adapter hashes, each with a number (its worth), iterated by ascending worth: the order of eviction."""

    def __init__(self) -> None:
        self._worth: dict[AdapterHash, float] = {}
        self._order: list[tuple[float, AdapterHash]] = []

    def __iter__(self) -> Iterator[AdapterHash]:
        return (adapter_hash for _, adapter_hash in self._order)

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, adapter_hash: AdapterHash) -> bool:
        return adapter_hash in self._worth

    def set(self, adapter_hash: AdapterHash, worth: float | None) -> None:
        """Insert an adapter or change its worth. None removes the adapter, if the set has it."""
        before = self._worth.get(adapter_hash)
        if before == worth:
            return
        if before is not None:
            del self._order[bisect_left(self._order, (before, adapter_hash))], self._worth[adapter_hash]
        if worth is not None:
            self._worth[adapter_hash] = worth
            insort(self._order, (worth, adapter_hash))


class Held(NamedTuple):
    """Resources of one adapter, or of all adapters together: device pages and slots of the adapter table that they
    hold, those that pinned adapters need, host memory, and pages that are idle."""

    pages: int = 0
    adapter_slots: int = 0
    """Slots of the adapter table."""
    pinned_pages: int = 0
    """Pages that pinned adapters need, resident or not."""
    pinned_adapter_slots: int = 0
    host_bytes: int = 0
    idle_pages: int = 0
    """Pages of resident adapters that no running sequence uses and that no operator has pinned."""

    @classmethod
    def by(cls, adapter: Adapter) -> Held:
        pages = len(adapter.pages)
        idle = 0 if adapter.running or adapter.pinned else pages
        pinned = adapter.num_pages if adapter.pinned else 0
        return cls(pages, int(pages > 0), pinned, int(adapter.pinned), adapter.host_bytes, idle)


NOTHING = Held()


class AdapterTiers:
    """Totals and eviction orders over all adapters of an engine state. Only `commit/adapters.py` changes them.

    Attributes:
        held: resources that all adapters together hold.
        idle: resident adapters that no sequence runs with and that are not pinned, in order of eviction.
        hosted: adapters in host memory, in order of eviction.
        missing: adapters that live requests need and that are neither resident nor in host memory nor being fetched (an
            ordered set).
        fetching: adapters whose fetch a plan has started and the executor has not answered yet (an ordered set).
        closing: dropped adapters, forgotten when they have no requests and no memory any more (an ordered set).
    """

    def __init__(self) -> None:
        self.held = NOTHING
        self.idle = Ranking()
        self.hosted = Ranking()
        self.missing: dict[AdapterHash, None] = {}
        self.fetching: dict[AdapterHash, None] = {}
        self.closing: dict[AdapterHash, None] = {}
        self._filed: dict[AdapterHash, Held] = {}

    def file(self, adapter: Adapter) -> None:
        """Update the totals, eviction orders and sets over all adapters (except `fetching`, which `commit/adapters.py`
        updates) to the current state of one adapter. Must be called after each change of the adapter."""
        now = Held.by(adapter)
        self._count(self._filed.get(adapter.adapter_hash, NOTHING), now)
        self._filed[adapter.adapter_hash] = now
        self.idle.set(adapter.adapter_hash, worth_on_device(adapter) if now.idle_pages else None)
        self.hosted.set(adapter.adapter_hash, worth_in_host(adapter) if adapter.host is HostCopy.PRESENT else None)
        _keep(self.missing, adapter.adapter_hash, adapter.is_missing)
        _keep(self.closing, adapter.adapter_hash, adapter.closing)

    def forget(self, adapter: Adapter) -> None:
        """Remove an adapter from the totals and sets over all adapters. It must be in no memory and have no live
        requests."""
        self._count(self._filed.pop(adapter.adapter_hash), NOTHING)
        self.closing.pop(adapter.adapter_hash, None)

    def _count(self, before: Held, now: Held) -> None:
        if before != now:
            self.held = Held(*[held - old + new for held, old, new in zip(self.held, before, now, strict=True)])


def _keep(members: dict[AdapterHash, None], adapter_hash: AdapterHash, belongs: bool) -> None:
    if belongs:
        members[adapter_hash] = None
    else:
        members.pop(adapter_hash, None)
