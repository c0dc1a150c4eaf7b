"""A plan in the making: remembers what it has given and taken, so that whatever it adds next still fits."""

from __future__ import annotations

from collections import Counter

from engine.core.adapter_budget import AdapterBudget
from engine.core.adapters import Adapter, Residency
from engine.core.page_budget import PageBudget
from engine.core.policy import Policy
from engine.core.prefix import page_keys
from engine.core.saves import Saves
from engine.core.state import EngineState
from engine.core.step_budget import StepBudget
from engine.core.types import (
    AdapterId,
    AdapterLoad,
    Admission,
    Cause,
    HostPageId,
    Lane,
    PageCopy,
    PageId,
    PrefixKey,
    ScheduledChunk,
    Sequence,
    StepPlan,
)


class Draft:
    """Builds one StepPlan. Reads the state and the policy, changes only itself."""

    def __init__(self, state: EngineState, policy: Policy, now: float) -> None:
        self._state = state
        self._config = state.config
        self._policy = policy
        self._now = now
        self._lane = Lane.INTERACTIVE
        self._budget = StepBudget(state, now, policy.timed)
        self._pages = PageBudget(state)
        self._host = Saves(state)
        self._adapters = AdapterBudget(state, self._pages)
        self._draining: set[AdapterId] = set()
        """Not started with any more, so that an adapter that has been waited for too long finds room."""
        self._reserved = 0
        """Pages kept for adapters that have been waited for too long."""
        self._no_room = False
        """Somebody of a higher lane found no room: nobody else starts."""
        self._too_many = dict.fromkeys(Lane, 1 << 30)
        """Pages of an adapter that found no room for a lane: nor does a larger one."""
        self._promised: set[PrefixKey] = set()
        self._preempted: dict[str, Sequence] = {}
        self._causes: list[Cause] = []
        self._chunks: dict[str, ScheduledChunk] = {}
        self._admitted: list[Admission] = []
        self._restores: list[PageCopy] = []
        self._loads: dict[AdapterId, AdapterLoad] = {}

    def enter(self, lane: Lane) -> None:
        """From now on it is this lane's turn."""
        self._lane = lane
        self._budget.enter(lane)

    @property
    def takes_new(self) -> bool:
        """Somebody waiting in this lane may start. A quick no spares looking at all of them."""
        is_full = self._lane is not Lane.INTERACTIVE and self._slots_missing() > 0
        return not (self._no_room or is_full) and (self._budget.is_open or self._policy.gathers)

    def advance(self, seq: Sequence) -> None:
        """Gives a running sequence its next chunk; if it cannot have the pages it must have, it is preempted itself."""
        if seq.id in self._preempted:
            return
        start = seq.num_computed
        count = self._budget.grant(seq, start, len(seq.tokens) - start)
        if not count:
            return
        missing = self._config.pages_for(start + count) - len(seq.pages)
        if missing <= 0:
            self._schedule(seq, start, count, ())
        elif self._make_room(missing, seq):
            self._schedule(seq, start, count, self._pages.take(missing, self._takes_as(seq)))
        else:
            self._budget.take_back(seq, start, count)
            self._preempt(seq, Cause.PAGES)

    def start(self, seq: Sequence) -> bool:
        """Starts a waiting sequence, or its adapter's load. False: no room, and nobody behind it may start either."""
        if not self.takes_new:
            return False
        adapter = self._state.adapters[seq.request.adapter] if seq.request.adapter else None
        if adapter is None:
            return self._admit(seq)
        if adapter.id in self._draining:
            return True
        if adapter.residency is Residency.RESIDENT and adapter.id not in self._adapters.evicted:
            self._adapters.wanted.add(adapter.id)
            return self._admit(seq)
        return self._load(adapter, seq)

    def finish(self) -> StepPlan:
        self._adapters.evict_closed()
        self._budget.move_pages(self._host.checkpoint(self._preempted))
        features = self._budget.features
        return StepPlan(
            now=self._now,
            predicted=self._state.ledger.model.predict(features),
            features=features,
            alone=self._budget.alone,
            saves=tuple(self._host.saved.values()),
            saved_keys=tuple(self._host.saved),
            checkpoints=tuple(self._host.checkpoints.items()),
            released=(*self._state.released, *self._preempted),
            preempted=tuple(self._preempted),
            causes=tuple(self._causes),
            dropped_cache=tuple(self._pages.dropped),
            evicted=tuple(self._adapters.evicted),
            loads=tuple(self._loads.values()),
            restores=tuple(self._restores),
            admitted=tuple(self._admitted),
            chunks=tuple(self._chunks.values()),
        )

    def _schedule(self, seq: Sequence, start: int, num_tokens: int, new_pages: tuple[PageId, ...]) -> None:
        samples = start + num_tokens == len(seq.tokens)
        self._chunks[seq.id] = ScheduledChunk(seq.id, start, num_tokens, new_pages, samples)

    def _admit(self, seq: Sequence) -> bool:
        """Takes pages for every known token at once, so that sequences half-way through a prompt never fight."""
        keys = self._keys(seq)
        cached = self._pages.still_cached(self._state.prefix.match(keys)) if self._config.prefix_caching else []
        restorable = self._host.match(keys[len(cached) :])
        known = len(cached) + len(restorable)
        is_promised = known < len(keys) and self._is_promised(keys[known], seq)
        if is_promised or not self._budget.fits_pages(len(restorable)):
            self._host.let_go(keys[len(cached) : known])
            return is_promised
        self._pages.share(cached)
        num_computed = known * self._config.block_size
        count = self._budget.grant(seq, num_computed, len(seq.tokens) - num_computed)
        missing = self._config.pages_for(len(seq.tokens)) - len(cached)
        if not (count or self._policy.gathers) or not self._make_room(missing, seq, Cause.SLOT):
            self._budget.take_back(seq, num_computed, count)
            self._pages.unshare(cached)
            self._host.let_go(keys[len(cached) : known])
            self._no_room = self._no_room or bool(count and seq.lane is Lane.INTERACTIVE)
            return False
        new = self._pages.take(missing, self._takes_as(seq))
        self._restore(new, restorable)
        self._admitted.append(_admission(seq, num_computed, (*cached, *new)))
        self._promised.update(keys[known:])
        if seq.request.adapter:
            self._adapters.pins[seq.request.adapter] += 1
        if count:
            self._schedule(seq, num_computed, count, ())
        return True

    def _keys(self, seq: Sequence) -> list[PrefixKey]:
        """Of the pages whose content may be known already, leaving at least one token to compute."""
        if not (self._config.prefix_caching or self._state.host.num_pages):
            return []
        return page_keys(seq, (len(seq.tokens) - 1) // self._config.block_size, self._config.block_size)

    def _is_promised(self, key: PrefixKey, seq: Sequence) -> bool:
        """Somebody who is served no later is computing this page: waiting for it is cheaper than doing it again."""
        if not self._config.prefix_caching:
            return False
        owner = self._state.running.get(self._state.prefix.promised.get(key, ""))
        if owner is None or owner.id in self._preempted:
            return key in self._promised
        return owner.lane <= seq.lane

    def _restore(self, pages: tuple[PageId, ...], host_pages: list[HostPageId]) -> None:
        self._restores += map(PageCopy, pages, host_pages)
        self._budget.move_pages(len(host_pages))

    def _make_room(self, pages: int, seq: Sequence, cause: Cause = Cause.PAGES) -> bool:
        """Makes pages (and for Cause.SLOT a sequence slot) available: idle adapters go first, then whom the policy
        names.

        False, with nothing done, if even that would not be enough.
        """
        pages += self._kept_free(seq)
        slots = self._slots_missing() if cause is Cause.SLOT else 0
        if not slots and pages <= self._pages.available(self._takes_as(seq)):
            return True
        victims = self._choose_victims(pages, slots, seq)
        if victims is None:
            return False
        for number, victim in enumerate(victims):
            self._preempt(victim, cause if cause is not Cause.SLOT or number < slots else Cause.PAGES)
        for adapter in self._adapters.idle():
            if self._pages.available(self._takes_as(seq)) >= pages:
                break
            self._adapters.evict(adapter)
        return True

    def _kept_free(self, seq: Sequence) -> int:
        """Pages that a sequence about to start must leave: for adapters waited for, and for others to grow into."""
        if seq.pages:
            return 0
        spare = seq.lane is not Lane.INTERACTIVE and (self._state.running or self._admitted)
        return self._reserved + (int(self._config.scheduling.watermark * self._config.num_pages) if spare else 0)

    def _takes_as(self, seq: Sequence) -> Lane:
        """The lane whose idle pages it may have: a batch sequence too large for what is never held takes any."""
        room = self._config.usable_pages - self._state.adapter_pages - self._state.most_held
        return seq.lane if self._config.pages_for(len(seq.tokens)) <= room // 2 else Lane.INTERACTIVE

    def _slots_missing(self) -> int:
        """Sequences that must stop for one more to run."""
        running = len(self._state.running) - len(self._preempted) + len(self._admitted)
        return max(0, running + 1 - self._config.max_seqs)

    def _choose_victims(self, pages: int, slots: int, seq: Sequence) -> list[Sequence] | None:
        """The fewest of the policy's victims, in its order, that yield enough; None if all of them do not."""
        victims: list[Sequence] = []
        gain = self._pages.available(self._takes_as(seq))
        if gain < pages:
            gain += sum(adapter.num_pages for adapter in self._adapters.idle())
        if gain >= pages and slots <= 0:
            return victims
        pins, let_go = self._adapters.pins.copy(), Counter[PageId]()
        for victim in self._policy.victims(self._state, seq):
            if victim is seq:
                return None
            if victim.id in self._preempted:
                continue
            victims.append(victim)
            gain += self._pages.gain(self._held(victim), let_go) + self._adapters.unpin(victim, pins)
            if gain >= pages and len(victims) >= slots:
                return victims
        return None

    def _held(self, victim: Sequence) -> list[PageId]:
        chunk = self._chunks.get(victim.id)
        return victim.pages + list(chunk.new_pages) if chunk else victim.pages

    def _preempt(self, victim: Sequence, cause: Cause) -> None:
        self._preempted[victim.id] = victim
        self._causes.append(cause)
        self._pages.give_back(reversed(self._held(victim)))
        chunk = self._chunks.pop(victim.id, None)
        if chunk:
            self._budget.take_back(victim, chunk.start, chunk.num_tokens)
        self._budget.move_pages(self._host.preempted(victim))
        if victim.request.adapter:
            self._adapters.pins[victim.request.adapter] -= 1

    def _load(self, adapter: Adapter, seq: Sequence) -> bool:
        """Sees to it that the adapter is on its way. Others may start meanwhile."""
        if adapter.residency is Residency.HOST and adapter.id not in self._loads:
            if adapter.num_pages >= self._too_many[seq.lane]:
                return True
            if not (self._is_old(seq) or self._budget.fits_pages(adapter.num_pages)):
                return True
            if not (
                self._adapters.make_table_row(len(self._loads))
                and self._make_room(adapter.num_pages, seq, Cause.ADAPTER)
            ):
                self._too_many[seq.lane] = adapter.num_pages
                self._make_way(adapter, seq)
                return True
            pages = self._pages.take(adapter.num_pages, self._takes_as(seq))
            self._loads[adapter.id] = AdapterLoad(adapter.id, pages, seq.id)
            self._budget.move_pages(adapter.num_pages)
        self._adapters.wanted.add(adapter.id)
        return adapter.id not in self._adapters.evicted

    def _make_way(self, adapter: Adapter, seq: Sequence) -> None:
        """There is no room for an adapter. Who has waited long enough ends the reign of the one served most."""
        if not self._is_old(seq):
            return
        above = {other.request.adapter for other in self._state.running.values() if other.lane < seq.lane}
        pinned = [
            self._state.adapters[name] for name, pins in self._adapters.pins.items() if pins > 0 and name not in above
        ]
        if pinned:
            self._reserved += adapter.num_pages
            self._draining.add(max(pinned, key=lambda other: (other.num_starts, other.id)).id)

    def _is_old(self, seq: Sequence) -> bool:
        """It has waited for its adapter as long as it should."""
        return self._now - seq.request.arrival >= self._config.scheduling.adapter_age_s


def _admission(seq: Sequence, num_computed: int, pages: tuple[PageId, ...]) -> Admission:
    request = seq.request
    return Admission(
        request_id=seq.id,
        tokens=tuple(seq.tokens),
        num_prompt=len(request.prompt),
        num_computed=num_computed,
        pages=pages,
        adapter=request.adapter,
        params=request.params,
    )
