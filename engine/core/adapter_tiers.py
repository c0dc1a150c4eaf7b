"""What the tiers hold together: sums and orders over all adapters, kept up as single adapters change.

A plan must not look at thousands of adapters to find the one to evict. What an adapter is worth changes only when it
does itself (see `Adapter.start`), so each is filed in its place once per change.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple

from engine.core.adapters import Adapter, HostCopy
from engine.core.types import AdapterId


class Ranking:
    """Adapters by what they are worth, the lowest first."""

    def __init__(self) -> None:
        self._worth: dict[AdapterId, float] = {}
        self._order: list[tuple[float, AdapterId]] = []

    def __iter__(self) -> Iterator[AdapterId]:
        return (adapter for _, adapter in self._order)

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, adapter: AdapterId) -> bool:
        return adapter in self._worth

    def set(self, adapter: AdapterId, worth: float | None) -> None:
        """None: it is not among them."""
        before = self._worth.get(adapter)
        if before == worth:
            return
        if before is not None:
            del self._order[bisect_left(self._order, (before, adapter))], self._worth[adapter]
        if worth is not None:
            self._worth[adapter] = worth
            insort(self._order, (worth, adapter))


class Held(NamedTuple):
    """What adapters take."""

    pages: int = 0
    rows: int = 0
    """Of the adapter table."""
    pinned_pages: int = 0
    """Of pinned ones, be they resident or not."""
    pinned_rows: int = 0
    host_bytes: int = 0
    idle_pages: int = 0
    """Of those that would make room."""

    @classmethod
    def by(cls, adapter: Adapter) -> Held:
        pages = len(adapter.pages)
        idle = 0 if adapter.running or adapter.pinned else pages
        pinned = adapter.num_pages if adapter.pinned else 0
        return cls(pages, int(pages > 0), pinned, int(adapter.pinned), adapter.host_bytes, idle)


NOTHING = Held()


class AdapterTiers:
    """`commit_adapters.py` is its only writer.

    Attributes:
        held: by all adapters together.
        idle: resident ones that nobody runs or pins, the first to make room first.
        hosted: those in host memory, likewise.
        missing: those to be fetched for somebody (an ordered set).
        fetching: fetches that plans have begun and nobody has answered yet (an ordered set).
        closing: those on their way out (an ordered set).
    """

    def __init__(self) -> None:
        self.held = NOTHING
        self.idle = Ranking()
        self.hosted = Ranking()
        self.missing: dict[AdapterId, None] = {}
        self.fetching: dict[AdapterId, None] = {}
        self.closing: dict[AdapterId, None] = {}
        self._filed: dict[AdapterId, Held] = {}

    def file(self, adapter: Adapter) -> None:
        """Counts an adapter as it is now: called after every change of one."""
        now = Held.by(adapter)
        self._count(self._filed.get(adapter.id, NOTHING), now)
        self._filed[adapter.id] = now
        self.idle.set(adapter.id, adapter.worth_on_device if now.idle_pages else None)
        self.hosted.set(adapter.id, adapter.worth_in_host if adapter.host is HostCopy.PRESENT else None)
        _keep(self.missing, adapter.id, adapter.is_missing)
        _keep(self.closing, adapter.id, adapter.closing)

    def forget(self, adapter: Adapter) -> None:
        """It is neither resident nor in host memory, and nobody knows it any more."""
        self._count(self._filed.pop(adapter.id), NOTHING)
        self.closing.pop(adapter.id, None)

    def _count(self, before: Held, now: Held) -> None:
        if before != now:
            self.held = Held(*[held - old + new for held, old, new in zip(self.held, before, now, strict=True)])


def _keep(members: dict[AdapterId, None], adapter: AdapterId, belongs: bool) -> None:
    if belongs:
        members[adapter] = None
    else:
        members.pop(adapter, None)
