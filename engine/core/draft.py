"""A plan in the making: remembers what it has given and taken, so that whatever it adds next still fits."""

from __future__ import annotations

from collections import Counter

from engine.core.adapters import Adapter, Residency, eviction_order
from engine.core.page_budget import PageBudget
from engine.core.policy import Policy
from engine.core.prefix import page_keys
from engine.core.state import EngineState
from engine.core.types import AdapterId, AdapterLoad, Admission, PageId, ScheduledChunk, Sequence, StepPlan


class Draft:
    """Builds one StepPlan. Reads the state and the policy, changes only itself."""

    def __init__(self, state: EngineState, policy: Policy, token_budget: int) -> None:
        self._state = state
        self._config = state.config
        self._policy = policy
        self._tokens_left = token_budget
        self._pages = PageBudget(state)
        self._pins: Counter[AdapterId] = Counter({a.id: a.running for a in state.adapters.values() if a.running})
        self._wanted: set[AdapterId] = set()
        """Adapters of waiting sequences already looked at: never evicted for somebody behind them."""
        self._preempted: dict[str, Sequence] = {}
        self._chunks: dict[str, ScheduledChunk] = {}
        self._admitted: list[Admission] = []
        self._loads: dict[AdapterId, AdapterLoad] = {}
        self._evicted: dict[AdapterId, Adapter] = {}

    def advance(self, seq: Sequence) -> None:
        """Gives a running sequence its next chunk; if it cannot have the pages it must have, it is preempted itself."""
        if seq.id in self._preempted or not self._tokens_left:
            return
        num_tokens = min(seq.num_remaining, self._tokens_left)
        missing = max(0, self._config.pages_for(seq.num_computed + num_tokens) - len(seq.pages))
        if self._make_room(missing, seq):
            self._schedule(seq, seq.num_computed, num_tokens, self._pages.take(missing))
        else:
            self._preempt(seq)

    def start(self, seq: Sequence) -> bool:
        """Starts a waiting sequence, or its adapter's load. False: no room, and nobody behind it may start either."""
        if not self._tokens_left:
            return False
        adapter = self._state.adapters[seq.request.adapter] if seq.request.adapter else None
        if adapter is None:
            return self._admit(seq)
        if adapter.residency is Residency.RESIDENT and adapter.id not in self._evicted:
            self._wanted.add(adapter.id)
            return self._admit(seq)
        return self._load(adapter, seq)

    def finish(self) -> StepPlan:
        self._evict_closed()
        return StepPlan(
            released=(*self._state.released, *self._preempted),
            preempted=tuple(self._preempted),
            dropped_cache=tuple(self._pages.dropped),
            evicted=tuple(self._evicted),
            loads=tuple(self._loads.values()),
            admitted=tuple(self._admitted),
            chunks=tuple(self._chunks.values()),
        )

    def _schedule(self, seq: Sequence, start: int, num_tokens: int, new_pages: tuple[PageId, ...]) -> None:
        samples = start + num_tokens == len(seq.tokens)
        self._chunks[seq.id] = ScheduledChunk(seq.id, start, num_tokens, new_pages, samples)
        self._tokens_left -= num_tokens

    def _admit(self, seq: Sequence) -> bool:
        """Takes pages for every known token at once, so that sequences half-way through a prompt never fight."""
        cached = self._match(seq)
        self._pages.share(cached)
        missing = self._config.pages_for(len(seq.tokens)) - len(cached)
        if not self._make_room(missing, seq, slots=1):
            self._pages.give_back(reversed(cached))
            return False
        num_computed = len(cached) * self._config.block_size
        pages = (*cached, *self._pages.take(missing))
        self._admitted.append(_admission(seq, num_computed, pages))
        if seq.request.adapter:
            self._pins[seq.request.adapter] += 1
        self._schedule(seq, num_computed, min(len(seq.tokens) - num_computed, self._tokens_left), ())
        return True

    def _match(self, seq: Sequence) -> list[PageId]:
        """Cached pages of the sequence's known tokens, leaving at least one token to compute."""
        if not self._config.prefix_caching:
            return []
        full_pages = (len(seq.tokens) - 1) // self._config.block_size
        keys = page_keys(seq, full_pages, self._config.block_size)
        return self._pages.still_cached(self._state.prefix.match(keys))

    def _make_room(self, pages: int, seq: Sequence, slots: int = 0) -> bool:
        """Makes pages (and a sequence slot) available: idle adapters go first, then whom the policy names.

        False, with nothing done, if even that would not be enough.
        """
        victims = self._choose_victims(pages, self._slots_missing(slots), seq)
        if victims is None:
            return False
        for victim in victims:
            self._preempt(victim)
        for adapter in self._evictable():
            if self._pages.available >= pages:
                break
            self._evict(adapter)
        return True

    def _slots_missing(self, slots: int) -> int:
        running = len(self._state.running) - len(self._preempted) + len(self._admitted)
        return running + slots - self._config.max_seqs if slots else 0

    def _choose_victims(self, pages: int, slots: int, seq: Sequence) -> list[Sequence] | None:
        """The fewest of the policy's victims, in its order, that yield enough; None if all of them do not."""
        victims: list[Sequence] = []
        gain, pins = self._pages.available, self._pins
        if gain < pages:
            gain += sum(adapter.num_pages for adapter in self._evictable())
        if gain >= pages and slots <= 0:
            return victims
        pins, let_go = pins.copy(), Counter[PageId]()
        for victim in self._policy.victims(self._state, seq):
            if victim is seq:
                return None
            if victim.id in self._preempted:
                continue
            victims.append(victim)
            gain += self._pages.gain(self._held(victim), let_go) + self._unpinned(victim, pins)
            if gain >= pages and len(victims) >= slots:
                return victims
        return None

    def _held(self, victim: Sequence) -> list[PageId]:
        chunk = self._chunks.get(victim.id)
        return victim.pages + list(chunk.new_pages) if chunk else victim.pages

    def _unpinned(self, victim: Sequence, pins: Counter[AdapterId]) -> int:
        """Pages of the victim's adapter, if the victim held its last pin."""
        adapter = victim.request.adapter
        if adapter is None:
            return 0
        pins[adapter] -= 1
        return self._state.adapters[adapter].num_pages if pins[adapter] == 0 and adapter not in self._wanted else 0

    def _preempt(self, victim: Sequence) -> None:
        self._preempted[victim.id] = victim
        self._pages.give_back(reversed(self._held(victim)))
        chunk = self._chunks.pop(victim.id, None)
        if chunk:
            self._tokens_left += chunk.num_tokens
        if victim.request.adapter:
            self._pins[victim.request.adapter] -= 1

    def _load(self, adapter: Adapter, seq: Sequence) -> bool:
        """Sees to it that the adapter is on its way. False: there is no room for it yet."""
        if adapter.residency is Residency.HOST and adapter.id not in self._loads:
            if not (self._make_table_row() and self._make_room(adapter.num_pages, seq)):
                return False
            self._loads[adapter.id] = AdapterLoad(adapter.id, self._pages.take(adapter.num_pages))
        self._wanted.add(adapter.id)
        return adapter.id not in self._evicted

    def _make_table_row(self) -> bool:
        """Frees a row of the adapter table when all are in use."""
        held = sum(a.residency is not Residency.HOST for a in self._state.adapters.values())
        if held - len(self._evicted) + len(self._loads) < self._config.max_resident_adapters:
            return True
        idle = self._evictable()
        if idle:
            self._evict(idle[0])
        return bool(idle)

    def _evictable(self) -> list[Adapter]:
        order = eviction_order(self._state.adapters, self._pins)
        return [a for a in order if a.id not in self._evicted and a.id not in self._wanted]

    def _evict(self, adapter: Adapter) -> None:
        self._evicted[adapter.id] = adapter
        self._pages.give_back(adapter.pages)

    def _evict_closed(self) -> None:
        """Dropped adapters leave the device as soon as nobody needs them."""
        for adapter in self._evictable():
            if adapter.closing and adapter.live == 0:
                self._evict(adapter)


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
