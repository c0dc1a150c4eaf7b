"""The pages a plan may still take: an overlay over the pool that leaves the pool as it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import takewhile

from engine.core.state import EngineState
from engine.core.types import Lane, PageId


class PageBudget:
    """Hands out pages, cheapest first: free ones, those the plan gave back, idle cached prefixes from the oldest.

    Idle prefixes of a higher lane are not for a lower one, unless nobody runs at all: then nothing is protected from
    the one that could not start otherwise.
    """

    def __init__(self, state: EngineState) -> None:
        self._prefix = state.prefix
        self._refs = state.pool.refs
        self._refs_change: Counter[PageId] = Counter()
        self._returned: dict[PageId, None] = {}
        self._shared: set[PageId] = set()
        """Idle pages this plan has referenced, and so taken out of the idle ones for good."""
        self._free: Iterator[PageId] = iter(state.pool.free)
        self._idle: dict[Lane, Iterator[PageId]] = {lane: iter(pages) for lane, pages in state.prefix.idle.items()}
        self._free_left = len(state.pool.free)
        self._idle_left = {lane: len(pages) for lane, pages in state.prefix.idle.items()}
        lowest_first = sorted(Lane, reverse=True)
        self._sources = {lane: [other for other in lowest_first if other >= lane or not state.running] for lane in Lane}
        """Whose idle pages may be taken for a lane."""
        self.dropped: dict[PageId, None] = {}
        """Taken pages whose cached prefix must be forgotten (an ordered set)."""

    def available(self, lane: Lane) -> int:
        """Pages that could be taken for `lane`."""
        idle = sum([self._idle_left[other] for other in self._sources[lane]])
        return self._free_left + len(self._returned) + idle

    def take(self, count: int, lane: Lane) -> tuple[PageId, ...]:
        """`count` pages; as many must be `available`."""
        return tuple([self._take_one(lane) for _ in range(count)]) if count else ()

    def share(self, pages: list[PageId]) -> None:
        """References cached pages, which can no longer be taken."""
        for page in pages:
            if page in self._returned:
                del self._returned[page]
            elif page not in self._shared and self._prefix.is_idle(page):
                self._idle_left[self._prefix.lane_of[page]] -= 1
                self._shared.add(page)
            self._refs_change[page] += 1

    def unshare(self, pages: list[PageId]) -> None:
        """Takes `share` of the same pages back, nothing having been taken since."""
        for page in pages:
            self._refs_change[page] -= 1
            if self._count(page) == 0 and page in self._shared:
                self._shared.remove(page)
                self._idle_left[self._prefix.lane_of[page]] += 1
            elif self._count(page) == 0:
                self._returned[page] = None

    def give_back(self, pages: Iterable[PageId]) -> None:
        """Drops one reference to each page; tails should come first, being worth least to the prefix cache."""
        for page in pages:
            self._refs_change[page] -= 1
            if self._count(page) == 0:
                self._returned[page] = None

    def gain(self, pages: list[PageId], let_go: Counter[PageId]) -> int:
        """Pages that would come free if one more owner let go, beside the references in `let_go`, which grows."""
        let_go.update(pages)
        return sum(self._count(page) == let_go[page] for page in pages)

    def still_cached(self, pages: list[PageId]) -> list[PageId]:
        """The leading pages whose prefix this plan has not dropped."""
        return list(takewhile(lambda page: page not in self.dropped, pages))

    def _count(self, page: PageId) -> int:
        return self._refs[page] + self._refs_change[page]

    def _take_one(self, lane: Lane) -> PageId:
        if self._free_left:
            self._free_left -= 1
            page = next(self._free)
        elif self._returned:
            page = next(iter(self._returned))
            del self._returned[page]
        else:
            source = next(other for other in self._sources[lane] if self._idle_left[other])
            self._idle_left[source] -= 1
            page = next(page for page in self._idle[source] if page not in self._shared)
        if page in self._prefix.key_of:
            self.dropped[page] = None
        self._refs_change[page] += 1
        return page
