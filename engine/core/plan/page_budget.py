"""The pages that a plan may still take on the device, and those that it saves to the host and restores from it:
overlays over the page pool and the host tier, which themselves are not changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import takewhile

from engine.core.messages.requests import HostPageId, Lane, PageId, PrefixKey
from engine.core.messages.step import PageCopy
from engine.core.state.engine_state import EngineState
from engine.core.state.sequence import Sequence, page_keys

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
    return {seq.id: seq.speculation.drafting.pages for seq in running if seq.speculation.drafting.pages}


class Saves:
    """Chooses the host pages of one plan's saves and restores of KV, as an overlay: the host tier is not changed."""

    def __init__(self, state: EngineState) -> None:
        self._host = state.host
        self._size = state.config.block_size
        self._state = state
        self._rules = state.config.scheduling
        self._most = self._rules.checkpoint_pages or -(-state.config.max_seqs // state.config.block_size)
        self._pinned: Counter[PrefixKey] = Counter()
        """Keys that this plan restores, each with the number of sequences that restore it. Their host pages are not
        overwritten."""
        self._given_up: set[PrefixKey] = set()
        """Keys whose host pages `saved` overwrites. Saves come before restores, so these keys can no longer be
        restored."""
        self._free: Iterator[HostPageId] = iter(state.host.free)
        self._reusable: dict[bool, Iterator[PrefixKey]] = {
            needed: state.host.reusable(needed=needed) for needed in (False, True)
        }
        """Keys of host copies that this plan may overwrite, in order. Under True, copies that live sequences need come
        last; under False, they are left out."""
        self.saved: dict[PrefixKey, PageCopy] = {}
        self.checkpoints: dict[str, int] = {}
        self.exports: dict[int, int] = {}

    def match(self, keys: list[PrefixKey]) -> list[HostPageId]:
        """Return the host pages of the leading keys that can be restored, and pin them against reuse until `let_go`."""
        if not self._host.page_of:
            return []
        pages = self._host.match(takewhile(lambda key: key not in self._given_up, keys))
        self._pinned.update(keys[: len(pages)])
        return pages

    def let_go(self, keys: list[PrefixKey]) -> None:
        """Unpin keys that `match` has pinned and that are not restored after all: their pages may be overwritten."""
        self._pinned.subtract(keys)

    def preempted(self, seq: Sequence) -> int:
        """Plan to save the full pages of a preempted sequence that were not copied to the host before, and return the
        number of copies. Nothing is copied if there are no host pages or the sequence shares none, or if it is a batch
        one and preemption is `checkpoint`: its pages are then copied while it runs."""
        if not (self._host.num_pages and seq.shares_pages):
            return 0
        if self._rules.preemption == "checkpoint" and seq.lane is not Lane.INTERACTIVE:
            return 0
        return self._save(seq, len(seq.pages))

    def checkpoint(self, gone: dict[str, Sequence]) -> int:
        """Plan to save full pages of running batch sequences that were not copied to the host before, at most
        `checkpoint_pages` in all (0: as many as decodes fill), and return the number of copies: 0 unless preemption is
        `checkpoint`. The sequences in `gone` (by request id), which this plan preempts, are skipped."""
        if not self._host.num_pages or self._rules.preemption != "checkpoint":
            return 0
        made = 0
        for seq in self._state.running.values():
            if made >= self._most:
                break
            if seq.prefix.num_saved >= seq.num_computed // self._size or seq.lane is Lane.INTERACTIVE:
                continue
            if seq.shares_pages and seq.id not in gone:
                made += self._save(seq, self._most - made)
        return made

    def export(self, most: int, room: int) -> int:
        """Plan to save to the host the pages that other engines have asked for (exports) and that only the device has,
        at most `most`, and return the number of copies. At most `room` more host pages are leased to exports, and no
        host page is taken from a live sequence."""
        made = 0
        for number, export in self._state.moves.exports.items():
            done = export.num_leased
            while done < len(export.keys) and room and not export.is_over:
                key = export.keys[done]
                if not self._is_known(key):
                    page = self._state.prefix.page_of.get(key)
                    if page is None or made >= most or not self._copy(key, page, needed=False):
                        break
                    made += 1
                self._pinned[key] += 1
                done, room = done + 1, room - 1
            if done > export.num_leased:
                self.exports[number] = done
        return made

    def evicted(self, pages: Iterable[PageId], most: int) -> int:
        """Plan to save cached pages that this plan evicts from the device, in order and at most `most`, and return the
        number of copies. They take no host page from a live sequence, and later requests with these prefixes restore
        them."""
        made = 0
        for page in pages:
            if made >= most:
                break
            key = self._state.prefix.key_of[page]
            made += not self._is_known(key) and self._copy(key, page, needed=False)
        return made

    def _save(self, seq: Sequence, most: int) -> int:
        full = seq.num_computed // self._size
        keys, done = page_keys(seq, full, self._size), seq.prefix.num_saved
        made = 0
        while done < full and made < most:
            if not self._is_known(keys[done]):
                if not self._copy(keys[done], seq.pages[done], needed=True):
                    break
                made += 1
            done += 1
        if done > seq.prefix.num_saved:
            self.checkpoints[seq.id] = done
        return made

    def _is_known(self, key: PrefixKey) -> bool:
        return key in self.saved or (key in self._host.page_of and key not in self._given_up)

    def _copy(self, key: PrefixKey, page: PageId, *, needed: bool) -> bool:
        """Plan to save the device page `page`, whose prefix key is `key`, on a free host page or, if there is none, on
        that of the first copy that may be overwritten. With `needed`, copies that live sequences need may be
        overwritten, too, but last. Returns False if no host page can be used."""
        host_page = next(self._free, None)
        if host_page is None:
            unpinned = (key for key in self._reusable[needed] if self._pinned[key] <= 0 and key not in self._given_up)
            old = next(unpinned, None)
            if old is None:
                return False
            self._given_up.add(old)
            host_page = self._host.page_of[old]
        self.saved[key] = PageCopy(page, host_page)
        return True
