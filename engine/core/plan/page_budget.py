"""The pages that a plan may still take: an overlay over the page pool, which itself is not changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import takewhile

from engine.core.messages.requests import Lane, PageId
from engine.core.state.engine_state import EngineState
from engine.core.state.sequence import Sequence

DRAFT_RESERVE = 16
"""The draft model takes pages only if one page in this many stays unused, so that growing sequences do not take the
pages away from it again at once."""


class PageBudget:
    """Allocates pages to one plan: free pages first, then pages that the plan has freed, then the pages of idle cached
    prefixes, the oldest first, then those of the draft model. The state's pool is not changed. A lower lane may not
    take idle prefixes of a higher one, unless no sequence runs at all: then nothing is protected from a sequence that
    could not start otherwise."""

    def __init__(self, state: EngineState) -> None:
        self._prefix = state.prefix
        self._num_pages = state.config.num_pages
        self._refs = state.pool.refs
        self._refs_change: Counter[PageId] = Counter()
        self._returned: dict[PageId, None] = {}
        self._shared: set[PageId] = set()
        """Idle pages that this plan has referenced, so that they are no longer idle."""
        self._free: Iterator[PageId] = iter(state.pool.free)
        self._idle: dict[Lane, Iterator[PageId]] = {lane: iter(pages) for lane, pages in state.prefix.idle.items()}
        self._free_left = len(state.pool.free)
        self._idle_left = {lane: len(pages) for lane, pages in state.prefix.idle.items()}
        lowest_first = sorted(Lane, reverse=True)
        self._sources = {lane: [other for other in lowest_first if other >= lane or not state.running] for lane in Lane}
        """Lanes whose idle pages each lane may take, in the order in which the pages are taken."""
        self.dropped: dict[PageId, None] = {}
        """Pages that were taken and must be dropped from the prefix cache (an ordered set)."""
        self._drafted = _drafted(state) if state.config.draft_block else {}
        """Pages of the draft model by request id, in the reverse of the order in which they are taken."""
        self._drafted_left = sum(map(len, self._drafted.values()))
        self.undrafted: list[str] = []
        """Requests whose pages of the draft model were taken."""

    def available(self, lane: Lane) -> int:
        """Return the number of device pages that this plan can still `take` for work of a lane, including pages of the
        draft model's KV and of those idle cached prefixes that the lane may evict."""
        return self._unused(lane) + self._drafted_left

    def _unused(self, lane: Lane) -> int:
        """Return the number of device pages that this plan can still `take` for work of a lane without taking any from
        the draft model: free ones, those that the plan has freed, and those of idle cached prefixes that the lane may
        evict."""
        idle = sum([self._idle_left[other] for other in self._sources[lane]])
        return self._free_left + len(self._returned) + idle

    def take(self, count: int, lane: Lane) -> tuple[PageId, ...]:
        """Allocate `count` device pages to work of a lane in this plan, evicting idle cached prefixes and then the
        draft model's KV if need be, and return their ids. The caller makes sure that as many are `available`."""
        return tuple([self._take_one(lane) for _ in range(count)]) if count else ()

    def take_free(self, count: int, lane: Lane) -> tuple[PageId, ...]:
        """Allocate at most `count` device pages to work of a lane in this plan, only from the free list, so that
        nothing is evicted for them, and return their ids."""
        return self.take(min(count, self._free_left), lane)

    def take_for_draft(self, count: int) -> tuple[PageId, ...] | None:
        """Take `count` pages for the draft model, including idle prefixes that the batch lane may take, and return
        their ids. None means that this plan took pages from the draft model, or that too few pages would stay unused
        (see `DRAFT_RESERVE`)."""
        reserve = self._num_pages // DRAFT_RESERVE
        if count and (self.undrafted or self._unused(Lane.BATCH) < count + reserve):
            return None
        return self.take(count, Lane.BATCH)

    def end_draft(self, seq: Sequence) -> None:
        """Free the pages that the draft model holds for a sequence that this plan preempts, so that the plan can take
        them."""
        pages = self._drafted.pop(seq.id, [])
        self._drafted_left -= len(pages)
        self.give_back(pages)

    def share(self, pages: list[PageId]) -> None:
        """Add a reference, in this plan, to each of these pages, which a starting sequence found in the prefix cache,
        so that the plan no longer evicts them."""
        for page in pages:
            if page in self._returned:
                del self._returned[page]
            elif page not in self._shared and self._prefix.is_idle(page):
                self._idle_left[self._prefix.lane_of[page]] -= 1
                self._shared.add(page)
            self._refs_change[page] += 1

    def unshare(self, pages: list[PageId]) -> None:
        """Undo `share` of the same pages, because the sequence does not start in this plan after all. No pages may have
        been taken in between."""
        for page in pages:
            self._refs_change[page] -= 1
            if self._count(page) == 0 and page in self._shared:
                self._shared.remove(page)
                self._idle_left[self._prefix.lane_of[page]] += 1
            elif self._count(page) == 0:
                self._returned[page] = None

    def give_back(self, pages: Iterable[PageId]) -> None:
        """Remove one reference to each page, in this plan, because a sequence is preempted, an adapter is evicted or
        the draft model loses its KV. The plan can allocate pages left without references again, in this order. The last
        pages of a sequence should come first, because they are worth least to the prefix cache."""
        for page in pages:
            self._refs_change[page] -= 1
            if self._count(page) == 0:
                self._returned[page] = None

    def gain(self, pages: list[PageId], let_go: Counter[PageId]) -> int:
        """Return how many more pages would be freed if a sequence that holds `pages` were preempted, too. `let_go`
        counts the references of the victims chosen so far; the call adds this sequence's references in place."""
        let_go.update(pages)
        return sum(self._count(page) == let_go[page] for page in pages)

    def still_cached(self, pages: list[PageId]) -> list[PageId]:
        """Return the leading ones of `pages`, which a sequence found in the prefix cache, up to but without the first
        one that this plan has taken for another use."""
        return list(takewhile(lambda page: page not in self.dropped, pages))

    def _count(self, page: PageId) -> int:
        return self._refs[page] + self._refs_change[page]

    def _take_one(self, lane: Lane) -> PageId:
        if self._drafted_left and not self._unused(lane):
            self._undraft()
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

    def _undraft(self) -> None:
        request_id, pages = self._drafted.popitem()
        self._drafted_left -= len(pages)
        self.give_back(pages)
        self.undrafted.append(request_id)


def _drafted(state: EngineState) -> dict[str, list[PageId]]:
    """Return the pages of the draft model's KV by request id. Those of batch work come last, and are taken first."""
    running = sorted(state.running.values(), key=lambda seq: seq.lane)
    return {seq.id: seq.drafting.pages for seq in running if seq.drafting.pages}
