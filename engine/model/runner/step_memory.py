"""The memory of steps: carries out what plans say about pages and adapters."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from engine.core.messages.step import StepPlan
from engine.model.adapters.fetcher import Fetcher
from engine.model.batch.rows import HostBatch
from engine.model.memory.arena import Arena, PageUses, used_pages
from engine.model.memory.host_pages import HostPages
from engine.model.memory.host_store import HostStore
from engine.model.runner.draft_model import DraftModel, NoDraftModel


class StepMemory:
    """Carries out the part of plans that concerns memory: KV pages and adapters, on the device and on the host."""

    def __init__(
        self,
        arena: Arena,
        host_pages: HostPages,
        host_adapters: HostStore,
        fetcher: Fetcher,
        draft_model: DraftModel | NoDraftModel,
    ) -> None:
        self._arena = arena
        self._host_pages = host_pages
        self._host_adapters = host_adapters
        self._fetcher = fetcher
        self._draft_model = draft_model

    def copy_pages(self, plan: StepPlan) -> None:
        """Start the plan's copies of KV pages, in this order: saves to host pages, forks (copies within the arena),
        restores from host pages."""
        pages = self._arena.pages
        if plan.forks:
            self._host_pages.move(pages, plan.saves, ())
            self._arena.fork(_forked(plan))
        self._host_pages.move(pages, () if plan.forks else plan.saves, plan.restores)

    def move_adapters(self, plan: StepPlan, uses: Iterable[PageUses]) -> None:
        """Evict and load adapters, drop their host copies, and cancel and start fetches. `uses` are the pages of the
        steps that were submitted and not collected."""
        for adapter_hash in plan.evicted:
            self._arena.evict_adapter(adapter_hash)
            self._draft_model.evict(adapter_hash)
        if plan.loads:
            self._load(plan, uses)
        for adapter_hash in plan.host_dropped:
            self._host_adapters.drop(adapter_hash)
        for adapter_hash in plan.cancelled_fetches:
            self._fetcher.cancel(adapter_hash)
        for fetch in plan.fetches:
            self._fetcher.begin(fetch)

    def uses(self, plan: StepPlan, batch: HostBatch | None) -> PageUses:
        """Return the pages that a plan's step, with the rows `batch`, reads or writes."""
        copies = (*plan.saves, *plan.restores)
        if batch is None:
            return PageUses(copies, (_forked(plan),))
        adapters = map(self._arena.adapter_pages, batch.segments.adapter_slots.tolist())
        return PageUses(copies, (_forked(plan), batch.block_tables, *adapters))

    def _load(self, plan: StepPlan, uses: Iterable[PageUses]) -> None:
        """Start to copy the adapters that a plan loads into their pages. Those that submitted steps, or the plan's own
        saves and forks, may still use are copied after the kernels launched so far."""
        own = PageUses(plan.saves, (_forked(plan),))
        used = used_pages([*uses, own], len(self._arena.pages))
        for load in plan.loads:
            adapter = self._host_adapters.get(load.adapter_hash)
            pages, more = load.pages[: adapter.layout.num_pages], load.pages[adapter.layout.num_pages :]
            busy = used[np.asarray(pages, dtype=np.int64)]
            self._arena.load_adapter(load.adapter_hash, adapter.layout, adapter.blob, pages, busy)
            self._draft_model.load(adapter.draft, load.adapter_hash, more)


def _forked(plan: StepPlan) -> NDArray[np.int64]:
    """Return the plan's forks of KV pages, int64 [number, 2]: source page and target page of each copy."""
    return np.asarray(plan.forks, dtype=np.int64).reshape(-1, 2)
