"""Adapters that a plan loads, uses and evicts: an overlay over the state, which a plan does not change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from engine.core.memory.adapters import Adapter
from engine.core.messages.requests import AdapterHash, Lane
from engine.core.messages.step import AdapterLoad
from engine.core.plan.page_budget import PageBudget
from engine.core.state.engine_state import EngineState
from engine.core.state.sequence import Sequence


class AdapterBudget:
    """Tracks how one plan changes the residency and the users of adapters, and which adapters the plan may still evict.

    Attributes:
        loads: adapters that this plan loads.
        evicted: adapters that this plan evicts.
        wanted: adapters that started sequences use and waiting sequences need that the plan has looked at. They are not
            evicted for a sequence that comes later in the order.
    """

    def __init__(self, state: EngineState, pages: PageBudget) -> None:
        self._adapters = state.adapters
        self._tiers = state.adapters
        self._pages = pages
        held, config = state.adapters.held, state.config
        self._pages_left = config.adapter_pages - held.pages
        self._adapter_slots_left = config.max_resident_adapters - held.adapter_slots
        self._users: Counter[AdapterHash] = Counter()
        """Change that this plan makes to the number of sequences that run with each adapter."""
        self._freed: dict[AdapterHash, None] = {}
        """Adapters whose last running sequence this plan preempts (an ordered set)."""
        self.loads: dict[AdapterHash, AdapterLoad] = {}
        self.evicted: dict[AdapterHash, Adapter] = {}
        self.wanted: set[AdapterHash] = set()

    def is_here(self, adapter: Adapter) -> bool:
        """Return whether an adapter is resident once this plan is committed."""
        return adapter.adapter_hash in self.loads or (adapter.is_resident and adapter.adapter_hash not in self.evicted)

    def room(self, pages: int, slots: int) -> Room:
        """Return the device resources that are free in this plan, without any eviction. The caller passes the free
        `pages` and the free `slots` of running sequences; the pages and adapter table slots that adapters may still
        take are added."""
        return Room(pages, slots, self._pages_left, self._adapter_slots_left)

    @property
    def idle_room(self) -> Room:
        """Device pages and adapter table slots that evicting all idle adapters would free, given what this plan has
        changed so far."""
        touched = self.wanted | self.evicted.keys() | self._users.keys()
        idle, known = self._tiers.idle, self._adapters
        gone = [known[each] for each in touched if each in idle and not self._may_go(each)]
        freed = [known[each] for each in self._freed if each not in idle and self._may_go(each)]
        pages = self._tiers.held.idle_pages + sum(a.num_pages for a in freed) - sum(a.num_pages for a in gone)
        return Room(pages, 0, pages, len(self._tiers.idle) + len(freed) - len(gone))

    def idle(self) -> Iterator[Adapter]:
        """Yield the adapters that may be evicted given what this plan has changed so far, in order of eviction: those
        idle in the state by worth, then those that its preemptions make idle."""
        for adapter_hash in chain(self._tiers.idle, list(self._freed)):
            if self._may_go(adapter_hash):
                yield self._adapters[adapter_hash]

    def running(self, adapter_hash: AdapterHash) -> int:
        """Return the number of sequences that run with an adapter once this plan is committed."""
        return self._adapters[adapter_hash].running + self._users[adapter_hash]

    def in_use(self, above: Lane, running: dict[str, Sequence]) -> list[Adapter]:
        """Return the adapters that sequences run with once this plan is committed, except those that a running sequence
        of a more urgent lane than `above` uses. The planner chooses from them an adapter with which no more sequences
        start, to make room for another one. `running` holds the state's running sequences by request id."""
        used = dict.fromkeys(seq.request.adapter_hash for seq in running.values())
        used.update(dict.fromkeys(each for each, change in self._users.items() if change > 0))
        kept = {seq.request.adapter_hash for seq in running.values() if seq.lane < above}
        return [self._adapters[each] for each in used if each and each not in kept and self.running(each) > 0]

    def start(self, adapter_hash: AdapterHash) -> None:
        self._users[adapter_hash] += 1

    def stop(self, adapter_hash: AdapterHash) -> None:
        self._users[adapter_hash] -= 1
        if not self.running(adapter_hash):
            self._freed[adapter_hash] = None

    def load(self, adapter: Adapter, request_id: str, lane: Lane) -> None:
        """Take pages for an adapter, of those that `lane` may take, and plan its load, for which the tenant of
        `request_id` is charged. The caller makes sure that enough pages are available."""
        self.loads[adapter.adapter_hash] = AdapterLoad(
            adapter.adapter_hash, self._pages.take(adapter.num_pages, lane), request_id
        )
        self._pages_left -= adapter.num_pages
        self._adapter_slots_left -= 1

    def evict(self, adapter: Adapter) -> None:
        self.evicted[adapter.adapter_hash] = adapter
        self._pages.give_back(adapter.pages)
        self._pages_left += adapter.num_pages
        self._adapter_slots_left += 1

    def freed_by(self, victim: Sequence, let_go: Counter[AdapterHash]) -> Room:
        """Return the device resources that the adapter of `victim` would free if the victim were preempted: none
        without an adapter, or if sequences other than the chosen victims run with it, the plan wants it or it is
        pinned. `let_go` counts the users of each adapter among the victims chosen so far; the call adds this victim in
        place."""
        adapter_hash = victim.request.adapter_hash
        if adapter_hash is None:
            return Room(0)
        let_go[adapter_hash] += 1
        adapter = self._adapters[adapter_hash]
        if self.running(adapter_hash) > let_go[adapter_hash] or adapter_hash in self.wanted or adapter.pinned:
            return Room(0)
        return Room(adapter.num_pages, 0, adapter.num_pages, 1)

    def evict_closed(self) -> None:
        """Evict the resident adapters that were dropped and that no live request needs any more."""
        for adapter_hash in self._tiers.closing:
            adapter = self._adapters[adapter_hash]
            if not adapter.live and adapter.is_resident and adapter_hash not in self.evicted:
                self.evict(adapter)

    def _may_go(self, adapter_hash: AdapterHash) -> bool:
        if adapter_hash in self.evicted or adapter_hash in self.wanted or adapter_hash in self.loads:
            return False
        return not self.running(adapter_hash) and not self._adapters[adapter_hash].pinned


class Room(NamedTuple):
    """Amounts of device resources, either needed by a sequence or free in a plan. An adapter's pages count both as
    `pages` and as `adapter_pages`, because adapters may not take all pages."""

    pages: int
    slots: int = 0
    """Slots of running sequences, of which there are `max_seqs`."""
    adapter_pages: int = 0
    adapter_slots: int = 0
    """Slots of the adapter table."""

    def covers(self, need: Room) -> bool:
        return (
            self.pages >= need.pages
            and self.slots >= need.slots
            and self.adapter_pages >= need.adapter_pages
            and self.adapter_slots >= need.adapter_slots
        )

    def plus(self, other: Room) -> Room:
        return Room(
            self.pages + other.pages,
            self.slots + other.slots,
            self.adapter_pages + other.adapter_pages,
            self.adapter_slots + other.adapter_slots,
        )
