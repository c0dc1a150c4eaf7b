"""Builds a plan: it tracks what the plan has allocated and freed so far, so that each addition still fits."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from engine.core.memory.adapters import Adapter
from engine.core.messages.requests import AdapterHash, Cause, HostPageId, Lane, PageId
from engine.core.messages.step import Admission, DraftAsk, PageCopy, PageFork, ScheduledChunk, StepPlan
from engine.core.plan.adapter_budget import AdapterBudget, Room
from engine.core.plan.clearing import Clearing
from engine.core.plan.draft_asks import ask_drafts
from engine.core.plan.fetch_budget import FetchBudget
from engine.core.plan.grammar_budget import GrammarBudget
from engine.core.plan.known_kv import Known, KnownKv
from engine.core.plan.page_budget import PageBudget
from engine.core.plan.proposals import add_proposals
from engine.core.plan.saves import Saves
from engine.core.plan.step_budget import StepBudget
from engine.core.plan.transaction import Transaction
from engine.core.policy.policies import Policy
from engine.core.state.engine_state import EngineState
from engine.core.state.sequence import Sequence

TRIED_SHARE = 0.005
"""Share of the device's time that saves of evicted prefixes may take even if none of them is ever restored."""
MOST_PASSED_OVER = 256
"""Maximum number of waiting sequences of a lane that one plan passes over because of adapters, grammars or fetches of
KV. Looking at each costs microseconds, and a queue may hold a hundred thousand."""


class Planner:
    """Builds one StepPlan from a state and a policy, and changes neither. For each lane, the caller calls `enter`, then
    `advance` for running and `start` for waiting sequences; then `fetch_ahead` and `prepare_ahead` prepare later
    starts, and `finish` returns the plan."""

    def __init__(self, state: EngineState, policy: Policy, now: float) -> None:
        self._state = state
        self._config = state.config
        self._policy = policy
        self._now = now
        self._lane = Lane.INTERACTIVE
        self._chunks: dict[str, ScheduledChunk] = {}
        self._budget = StepBudget(state, now, policy.timed)
        self._pages = PageBudget(state)
        self._host = Saves(state)
        self._adapters = AdapterBudget(state, self._pages)
        self._fetches = FetchBudget(state)
        self._grammars = GrammarBudget(state)
        self._clearing = Clearing(state, policy, self._budget, self._pages, self._adapters, self._host, self._chunks)
        self._known = KnownKv(state, now, self._pages, self._host, self._clearing.preempted)
        self._draining: set[AdapterHash] = set()
        """Resident adapters that no more sequences start with, so that they become idle and make room for an adapter
        that a request has waited for too long."""
        self._no_room = False
        """True means that an interactive sequence found no room, so that no further sequence starts in this plan."""
        self._too_many = dict.fromkeys(Lane, 1 << 30)
        """Size in pages of the last adapter that found no room, by lane. An adapter of at least that size finds none
        either."""
        self._passed_over = 0
        """Number of this lane's waiting sequences that were passed over because of adapters, grammars or fetches."""
        self._admitted: dict[str, Admission] = {}
        self._forks: list[PageFork] = []
        self._restores: list[PageCopy] = []

    def enter(self, lane: Lane) -> None:
        """Begin to plan a lane's part of the step: further calls of `advance` and `start` are for sequences of this
        lane, within the time limit that the step's budget sets for the lane."""
        self._lane = lane
        self._budget.enter(lane)
        self._passed_over = 0

    def in_turn(self, decodes: list[Sequence]) -> list[Sequence]:
        """Return which of the current lane's running `decodes` are to advance, in order: all, unless they take turns
        (see plan/turns.py)."""
        return self._budget.in_turn(decodes)

    @property
    def takes_new(self) -> bool:
        """Return whether this plan can still start any waiting sequence of the current lane: the lane's budget is open
        or the policy gathers batches, a slot is free (for the batch lane only), and no interactive sequence has failed
        to find room in this plan. The caller checks this before it looks at each sequence."""
        is_full = self._lane is not Lane.INTERACTIVE and self._clearing.slots_left <= 0
        return not (self._no_room or is_full) and (self._budget.is_open or self._policy.gathers)

    def advance(self, seq: Sequence) -> bool:
        """Schedule the next chunk of a running sequence, as far as the budget grants tokens. If no room can be made for
        its new pages, the sequence is preempted. Nothing happens to one that is preempted or waits for a token
        or a mask. Returns whether sequences after it may still get tokens; False means that the lane gets no more in
        this plan."""
        if (seq.num_pending and seq.waits_for_token) or seq.id in self._clearing.preempted:
            return True
        if self._state.masks.blocks(seq):
            return True
        start = seq.num_computed
        left = len(seq.tokens) + seq.num_pending - start
        count = self._budget.grant(seq, start, left)
        if not count:
            return self._budget.is_open
        missing = -(-(start + count) // self._config.block_size) - len(seq.pages)
        if missing <= 0:
            self._chunks[seq.id] = ScheduledChunk(seq.id, start, count, (), count == left)
        elif self._clearing.make(Room(missing), seq):
            pages = self._pages.take(missing, self._clearing.takes_as(seq))
            self._chunks[seq.id] = ScheduledChunk(seq.id, start, count, pages, count == left)
        else:
            self._budget.take_back(seq, start, count)
            self._clearing.preempt(seq, Cause.PAGES)
        return True

    def start(self, seq: Sequence) -> bool:
        """Start a waiting sequence, with a load of its adapter if needed, or pass it over: if its grammar is not ready,
        its pages are being fetched, another sequence is computing its next prefix page, or its adapter is neither
        resident nor in host memory, was evicted by this plan, finds no room or time for the copy, or takes no more
        sequences, to make way for another. Returns whether sequences after it may still start; False means that the
        lane starts no more in this plan."""
        if seq.id in self._admitted:
            return True
        if not self.takes_new:
            return False
        if self._state.grammars.blocks(seq.request.params.grammar):
            return self._pass_over()
        if self._state.moves.imports and self._state.moves.holds_up(seq.id, self._now):
            return self._pass_over()
        adapter = self._state.adapters[seq.request.adapter_hash] if seq.request.adapter_hash else None
        if adapter is None:
            return self._admit(seq)
        if adapter.adapter_hash not in self._draining and self._adapters.is_here(adapter):
            self._adapters.wanted.add(adapter.adapter_hash)
            return self._admit(seq)
        if (
            adapter.adapter_hash in self._draining
            or not self._fetches.is_held(adapter)
            or adapter.adapter_hash in self._adapters.evicted
        ):
            return self._pass_over()
        return self._start_with(adapter, seq)

    def fetch_ahead(self, lane: Lane, waiting: Iterable[Sequence]) -> None:
        """Plan fetches, from disk to host memory, of the missing adapters of a lane's first `prefetch_window` sequences
        in `waiting` that this plan does not start, as far as fetches and host memory are free, and keep the host copies
        that the others of these sequences need."""
        if not self._fetches.is_open(lane):
            return
        still_waiting = (seq for seq in waiting if seq.id not in self._admitted)
        for seq in islice(still_waiting, self._config.prefetch_window):
            adapter = self._state.adapters.get(seq.request.adapter_hash or "")
            if adapter is None:
                continue
            if adapter.is_missing:
                self._fetches.fetch(adapter, is_old=self._is_old(seq))
            self._fetches.kept.add(adapter.adapter_hash)
            if not self._fetches.is_open(lane):
                return

    def prepare_ahead(self, lane: Lane, waiting: Iterable[Sequence]) -> None:
        """Plan to prepare, concurrently with steps, the grammars of a lane's first `prefetch_window` sequences in
        `waiting`, as far as preparations and memory are free, so that these sequences need not wait for their grammars
        later."""
        if self._grammars.is_open(lane):
            for seq in islice(waiting, self._config.prefetch_window):
                self._grammars.prepare(seq.request, lane)

    def finish(self) -> StepPlan:
        self._adapters.evict_closed()
        self._fetches.drop_closed()
        if self._state.moves.exports:
            most = max(1, self._budget.copies_beside(self._config.num_pages))
            self._budget.move_pages(self._host.export(most, self._state.movable_pages))
        self._budget.move_pages(self._host.checkpoint(self._clearing.preempted))
        self._budget.move_pages(self._keep_evicted())
        drafts, drafting_s = self._speculate() if self._config.speculation else ((), 0.0)
        features = self._budget.features
        masks_s = self._state.ledger.masks_s(self._state.sequences[name] for name in self._chunks)
        return StepPlan(
            now=self._now,
            predicted=self._state.ledger.model.predict(features) + drafting_s + masks_s if self._chunks else 0.0,
            features=features,
            alone=self._budget.alone,
            saves=tuple(self._host.saved.values()),
            saved_keys=tuple(self._host.saved),
            checkpoints=tuple(self._host.checkpoints.items()),
            exports=tuple(self._host.exports.items()),
            released=(*self._state.released, *self._clearing.preempted),
            preempted=tuple(self._clearing.preempted),
            causes=tuple(self._clearing.causes),
            dropped_cache=tuple(self._pages.dropped),
            evicted=tuple(self._adapters.evicted),
            loads=tuple(self._adapters.loads.values()),
            host_dropped=tuple(self._fetches.dropped),
            fetches=tuple(self._fetches.fetches.values()),
            cancelled_fetches=self._fetches.cancelled(),
            prepared=tuple(self._grammars.prepared),
            prepared_for=tuple(request.id for request in self._grammars.prepared.values()),
            forgotten=tuple(self._state.grammars.forgotten),
            masks=self._state.masks.choose(self._now, self._clearing.preempted, computes=bool(self._chunks)),
            forks=tuple(self._forks),
            restores=tuple(self._restores),
            admitted=tuple(self._admitted.values()),
            chunks=tuple(self._chunks.values()),
            undrafted=tuple(name for name in self._pages.undrafted if name not in self._clearing.preempted),
            drafts=drafts,
        )

    def _keep_evicted(self) -> int:
        """Plan to save to the host the cached pages that this plan evicts, if copying a page to the host and back is
        predicted to take less time than computing its tokens. As many are saved as the plan restores, because restored
        pages save more time than these copies take, and further ones as far as the step has time and `_saves_to_try`
        allows. A prefix's first pages are saved first, because the others are of no use without them. Returns the
        number of copies."""
        if not (self._state.host.num_pages and self._pages.dropped):
            return 0
        ledger, pages = self._state.ledger, list(reversed(self._pages.dropped))
        price, saving = 2 * ledger.model.prices.page, self._config.block_size * ledger.prefill_price
        if price >= saving:
            return 0
        more = min(self._budget.copies_beside(len(pages)), self._saves_to_try(price, saving))
        return self._host.evicted(pages, len(self._restores) + more)

    def _saves_to_try(self, price: float, saving: float) -> int:
        """Return how many evicted pages may be saved although they may never be restored: as many as the host tier has,
        once, and then as many as fit, at `price` seconds each, into the time that the pages restored so far have saved
        (`saving` seconds each) plus `TRIED_SHARE` of the device's time. Where prompts never begin alike, saves would
        otherwise cost a simulated H100 4 % of its throughput."""
        counters, host = self._state.counters, self._state.host
        earned = counters.pages_restored * saving + TRIED_SHARE * sum(self._state.ledger.busy.values())
        return max(0, host.num_pages - counters.pages_saved + int(earned / price)) if price else host.num_pages

    def _speculate(self) -> tuple[tuple[DraftAsk, ...], float]:
        """Add proposals to the chunks, and return what the draft model, if there is one, shall do after the step, with
        its predicted seconds."""
        alone = self._state.ledger.model.predict(self._budget.features)
        add_proposals(self._state, self._chunks, self._budget, self._pages)
        if not self._config.draft_block:
            return (), 0.0
        drafts, seconds = ask_drafts(self._state, self._chunks, self._budget, self._pages, alone)
        self._budget.alone += seconds if self._budget.alone else 0.0
        return drafts, seconds

    def _pass_over(self) -> bool:
        """Count a waiting sequence that this plan does not start although later ones of its lane may start. Returns
        False once `MOST_PASSED_OVER` were counted: the plan then starts no more sequences of the lane."""
        self._passed_over += 1
        return self._passed_over < MOST_PASSED_OVER

    def _start_with(self, adapter: Adapter, seq: Sequence) -> bool:
        """Try to start a sequence together with the copy of its adapter from host memory, and otherwise pass it over.
        Returns whether sequences after it may still start."""
        if adapter.num_pages >= self._too_many[seq.lane]:
            return self._pass_over()
        if not self._budget.fits_pages(adapter.num_pages, is_old=self._is_old(seq)):
            return self._pass_over()
        if self._clearing.can_make(_room_of(adapter), seq):
            return self._admit(seq, adapter)
        self._too_many[seq.lane] = adapter.num_pages
        self._make_way(adapter, seq)
        return self._pass_over()

    def _admit(self, seq: Sequence, load: Adapter | None = None) -> bool:
        """Start a sequence if the budget grants it tokens (or the policy gathers batches), its pages find room and the
        step has time for the copies of KV and adapter. It takes the pages of all its known tokens at once, so that
        sequences in the middle of their prompts never compete for pages. `load` is the adapter to copy to the device;
        None means that no copy is needed.

        Returns:
            Whether sequences after it may still start. This is also True if the sequence is skipped because its next
                prefix page is being computed by another one, or fetched.
        """
        with Transaction() as taking:
            known = self._known.find(seq, taking)
            if known.is_promised or not self._budget.fits_pages(len(known.on_host)):
                return known.is_promised
            count = self._take_tokens(seq, known, load, taking)
            has_room = bool(count or self._policy.gathers) and self._take_room(seq, known, load)
            if has_room:
                taking.keep()
        if has_room:
            self._begin(seq, known, count, load)
            return True
        self._no_room = self._no_room or bool(count and seq.lane is Lane.INTERACTIVE)
        if load and not count:
            self._load_alone(load, seq)
        return False

    def _take_tokens(self, seq: Sequence, known: Known, load: Adapter | None, taking: Transaction) -> int:
        """Take a sequence's cached pages, the time for the copy of its adapter, and its first tokens. Returns the
        number of these."""
        self._pages.share(known.cached)
        taking.took(self._pages.unshare, known.cached)
        if load:
            self._budget.move_pages(load.num_pages)
            taking.took(self._budget.move_pages, -load.num_pages)
        count = self._budget.grant(seq, known.num_tokens, len(seq.tokens) - known.num_tokens)
        taking.took(self._budget.take_back, seq, known.num_tokens, count)
        return count

    def _take_room(self, seq: Sequence, known: Known, load: Adapter | None) -> bool:
        """Make room for a sequence and its adapter. Returns whether there is room; otherwise nothing has changed."""
        need = Room(self._num_missing(seq, known), slots=1)
        if load is None:
            return self._clearing.make(need, seq, Cause.PAGES)
        return self._clearing.make(need.plus(_room_of(load)), seq, Cause.ADAPTER)

    def _begin(self, seq: Sequence, known: Known, count: int, load: Adapter | None) -> None:
        """Start a sequence, for which room was made, with its first `count` tokens."""
        if load:
            self._load(load, seq)
        new = self._pages.take(self._num_missing(seq, known), self._clearing.takes_as(seq))
        self._restore(new, known.on_host)
        if known.tail is not None:
            self._forks.append(PageFork(known.tail, new[len(known.on_host)]))
        self._note_admitted(seq, known.num_tokens, (*known.cached, *new))
        self._known.promise(known.keys_to_compute)
        if count:
            is_last = known.num_tokens + count == len(seq.tokens)
            self._chunks[seq.id] = ScheduledChunk(seq.id, known.num_tokens, count, (), is_last)

    def _num_missing(self, seq: Sequence, known: Known) -> int:
        return self._config.pages_for(len(seq.tokens)) - len(known.cached)

    def _note_admitted(self, seq: Sequence, num_computed: int, pages: tuple[PageId, ...]) -> None:
        self._admitted[seq.id] = _admission(seq, num_computed, pages)
        self._clearing.num_admitted += 1
        if seq.request.adapter_hash:
            self._adapters.start(seq.request.adapter_hash)

    def _load_alone(self, adapter: Adapter, seq: Sequence) -> None:
        """Load the adapter of a batch sequence, if room can be made, without starting the sequence, which then starts
        in the next step: a step that batch work shares often has time for the copy and for nothing else."""
        if seq.lane is not Lane.INTERACTIVE and self._clearing.make(_room_of(adapter), seq, Cause.ADAPTER):
            self._budget.move_pages(adapter.num_pages)
            self._load(adapter, seq)

    def _load(self, adapter: Adapter, seq: Sequence) -> None:
        self._adapters.load(adapter, seq.id, self._clearing.takes_as(seq))
        self._adapters.wanted.add(adapter.adapter_hash)
        self._fetches.kept.add(adapter.adapter_hash)

    def _restore(self, pages: tuple[PageId, ...], host_pages: list[HostPageId]) -> None:
        self._restores += map(PageCopy, pages, host_pages)
        self._budget.move_pages(len(host_pages))

    def _make_way(self, adapter: Adapter, seq: Sequence) -> None:
        """Handle an adapter that found no room. If its sequence arrived `adapter_age_s` ago or earlier, choose the
        adapter with the most starts among those in use that are not pinned and that no sequence of a more urgent lane
        runs with: no more sequences start with it, and room is reserved for the adapter that waits."""
        if not self._is_old(seq):
            return
        candidates = [a for a in self._adapters.in_use(seq.lane, self._state.running) if not a.pinned]
        if candidates:
            self._clearing.reserved = self._clearing.reserved.plus(_room_of(adapter))
            # By order of magnitude: while one adapter drains, another gets more starts, and switching to that one would
            # empty neither.
            self._draining.add(
                max(candidates, key=lambda other: (other.num_starts.bit_length(), other.adapter_hash)).adapter_hash
            )

    def _is_old(self, seq: Sequence) -> bool:
        """Return whether a waiting sequence arrived at least `adapter_age_s` ago, so that room is made for its adapter
        even at the expense of adapters of other sequences."""
        return self._now - seq.request.arrival >= self._config.scheduling.adapter_age_s


def _room_of(adapter: Adapter) -> Room:
    """Return the device pages and the slot of the adapter table that an adapter takes when it is loaded."""
    return Room(adapter.num_pages, 0, adapter.num_pages, 1)


def _admission(seq: Sequence, num_computed: int, pages: tuple[PageId, ...]) -> Admission:
    request = seq.request
    return Admission(
        request_id=seq.id,
        tokens=tuple(seq.tokens),
        num_prompt=len(request.prompt_ids),
        num_computed=num_computed,
        pages=pages,
        adapter_hash=request.adapter_hash,
        params=request.params,
        pooling=request.pooling,
        adapter_begin=seq.adapter_begin,
        num_scored=seq.num_scored,
    )
