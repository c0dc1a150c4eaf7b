"""Which resident adapters a plan may still evict: an overlay over their users that leaves the adapters as they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain

from engine.core.adapters import Adapter
from engine.core.page_budget import PageBudget
from engine.core.room import Room
from engine.core.sequence import Sequence
from engine.core.state import EngineState
from engine.core.types import AdapterId, AdapterLoad, Lane


class AdapterBudget:
    """Attributes:
    loads: those this plan loads.
    evicted: those it evicts.
    wanted: adapters of waiting sequences already looked at; never evicted for somebody behind them.
    """

    def __init__(self, state: EngineState, pages: PageBudget) -> None:
        self._adapters = state.adapters
        self._tiers = state.tiers
        self._pages = pages
        held, config = state.tiers.held, state.config
        self._pages_left = config.adapter_pages - held.pages
        self._rows_left = config.max_resident_adapters - held.rows
        self._users: Counter[AdapterId] = Counter()
        """What this plan changes in how many sequences run with each."""
        self._freed: dict[AdapterId, None] = {}
        """Those whose last sequence it preempts (an ordered set)."""
        self.loads: dict[AdapterId, AdapterLoad] = {}
        self.evicted: dict[AdapterId, Adapter] = {}
        self.wanted: set[AdapterId] = set()

    def is_here(self, adapter: Adapter) -> bool:
        """Resident, once this plan is carried out."""
        return adapter.id in self.loads or (adapter.is_resident and adapter.id not in self.evicted)

    def room(self, pages: int, slots: int) -> Room:
        """What is there without evicting anybody."""
        return Room(pages, slots, self._pages_left, self._rows_left)

    @property
    def idle_room(self) -> Room:
        """What evicting every idle adapter would give."""
        touched = self.wanted | self.evicted.keys() | self._users.keys()
        gone = [self._adapters[name] for name in touched if name in self._tiers.idle and not self._may_go(name)]
        freed = [self._adapters[name] for name in self._freed if name not in self._tiers.idle and self._may_go(name)]
        pages = self._tiers.held.idle_pages + sum(a.num_pages for a in freed) - sum(a.num_pages for a in gone)
        return Room(pages, 0, pages, len(self._tiers.idle) + len(freed) - len(gone))

    def idle(self) -> Iterator[Adapter]:
        """Those that may make room, the first to go first."""
        for name in chain(self._tiers.idle, list(self._freed)):
            if self._may_go(name):
                yield self._adapters[name]

    def running(self, adapter: AdapterId) -> int:
        """Sequences that run with it, once this plan is carried out."""
        return self._adapters[adapter].running + self._users[adapter]

    def in_use(self, above: Lane, running: dict[str, Sequence]) -> list[Adapter]:
        """Adapters of running sequences, but for those of lanes above one."""
        names = dict.fromkeys(seq.request.adapter for seq in running.values())
        names.update(dict.fromkeys(name for name, change in self._users.items() if change > 0))
        kept = {seq.request.adapter for seq in running.values() if seq.lane < above}
        return [self._adapters[name] for name in names if name and name not in kept and self.running(name) > 0]

    def start(self, adapter: AdapterId) -> None:
        self._users[adapter] += 1

    def stop(self, adapter: AdapterId) -> None:
        self._users[adapter] -= 1
        if not self.running(adapter):
            self._freed[adapter] = None

    def load(self, adapter: Adapter, request_id: str, lane: Lane) -> None:
        """Takes the pages, as many of which must be there."""
        self.loads[adapter.id] = AdapterLoad(adapter.id, self._pages.take(adapter.num_pages, lane), request_id)
        self._pages_left -= adapter.num_pages
        self._rows_left -= 1

    def evict(self, adapter: Adapter) -> None:
        self.evicted[adapter.id] = adapter
        self._pages.give_back(adapter.pages)
        self._pages_left += adapter.num_pages
        self._rows_left += 1

    def freed_by(self, victim: Sequence, let_go: Counter[AdapterId]) -> Room:
        """What the victim's adapter would yield if nobody else runs it, beside those of `let_go`, which grows."""
        name = victim.request.adapter
        if name is None:
            return Room(0)
        let_go[name] += 1
        adapter = self._adapters[name]
        if self.running(name) > let_go[name] or name in self.wanted or adapter.pinned:
            return Room(0)
        return Room(adapter.num_pages, 0, adapter.num_pages, 1)

    def evict_closed(self) -> None:
        """Dropped adapters leave the device as soon as nobody needs them."""
        for name in self._tiers.closing:
            adapter = self._adapters[name]
            if not adapter.live and adapter.is_resident and name not in self.evicted:
                self.evict(adapter)

    def _may_go(self, name: AdapterId) -> bool:
        if name in self.evicted or name in self.wanted or name in self.loads:
            return False
        return not self.running(name) and not self._adapters[name].pinned
