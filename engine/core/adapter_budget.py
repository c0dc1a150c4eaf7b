"""Which resident adapters a plan may still evict: an overlay over their pins that leaves the adapters as they are."""

from __future__ import annotations

from collections import Counter

from engine.core.adapters import Adapter, Residency, eviction_order
from engine.core.page_budget import PageBudget
from engine.core.state import EngineState
from engine.core.types import AdapterId, Sequence


class AdapterBudget:
    """Attributes:
    pins: sequences that run with each adapter once this plan is carried out.
    wanted: adapters of waiting sequences already looked at; never evicted for somebody behind them.
    evicted: those this plan evicts.
    """

    def __init__(self, state: EngineState, pages: PageBudget) -> None:
        self._adapters = state.adapters
        self._max_resident = state.config.max_resident_adapters
        self._pages = pages
        self.pins: Counter[AdapterId] = Counter({a.id: a.running for a in state.adapters.values() if a.running})
        self.wanted: set[AdapterId] = set()
        self.evicted: dict[AdapterId, Adapter] = {}

    def idle(self) -> list[Adapter]:
        """Those that may make room, the first to go first."""
        order = eviction_order(self._adapters, self.pins)
        return [a for a in order if a.id not in self.evicted and a.id not in self.wanted]

    def evict(self, adapter: Adapter) -> None:
        self.evicted[adapter.id] = adapter
        self._pages.give_back(adapter.pages)

    def unpin(self, victim: Sequence, pins: Counter[AdapterId]) -> int:
        """Pages of the victim's adapter, if it held the last of `pins`, which it gives up."""
        adapter = victim.request.adapter
        if adapter is None:
            return 0
        pins[adapter] -= 1
        return self._adapters[adapter].num_pages if pins[adapter] == 0 and adapter not in self.wanted else 0

    def make_table_row(self, num_loads: int) -> bool:
        """Frees a row of the adapter table when all are in use, `num_loads` of them by this plan."""
        held = sum(a.residency is not Residency.HOST for a in self._adapters.values())
        if held - len(self.evicted) + num_loads < self._max_resident:
            return True
        idle = self.idle()
        if idle:
            self.evict(idle[0])
        return bool(idle)

    def evict_closed(self) -> None:
        """Dropped adapters leave the device as soon as nobody needs them."""
        for adapter in self.idle():
            if adapter.closing and adapter.live == 0:
                self.evict(adapter)
