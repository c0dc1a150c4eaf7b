"""Planning of the next step. Planning reads the state and changes nothing; the resulting plan fits that state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from engine.core.messages.features import StepForecast
from engine.core.messages.requests import Cause, Lane, LaneMode
from engine.core.messages.step import AdapterMoves, DraftAsk, GrammarWork, KeptKv, ScheduledChunk, StepPlan
from engine.core.plan.adapter_budget import Room
from engine.core.plan.clearing import Clearing, Overlays
from engine.core.plan.draft_asks import ask_drafts
from engine.core.plan.proposals import add_proposals
from engine.core.plan.starts import Starts
from engine.core.policy.policies import Policy
from engine.core.state.engine_state import EngineState
from engine.core.state.sequence import Sequence

TRIED_SHARE = 0.005
"""Share of the device's time that saves of evicted prefixes may take even if none of them is ever restored."""


def plan_step(state: EngineState, policy: Policy, now: float) -> StepPlan:
    """Return the plan of the next step without changing `state`; `now` is in seconds on the engine's clock. Lane by
    lane, the decodes whose turn it is (see plan/turns.py) advance, then running prompts, and then waiting sequences
    start, until time, tokens, slots or pages run out. Waiting sequences that the policy orders ahead start before
    running prompts advance. Each sequence asks for all its remaining tokens and gets a chunk of the size that the
    step's budget grants. Paused lanes start no sequences. The plan also fetches adapters and prepares grammars for
    waiting sequences. If a suspect request is on trial (see `Sequence.on_trial`) and can be computed, it is computed
    alone, otherwise left out."""
    if state.suspects and (trial := plan_trial(state, policy, now)) is not None:
        return trial
    planner = Planner(state, policy, now)
    starting = [lane for lane in Lane if state.waiting.modes[lane] is not LaneMode.PAUSED]
    for lane in Lane:
        planner.enter(lane)
        decodes, prompts = policy.order_running(state, lane)
        _try_each(state, planner.in_turn(decodes), planner.advance)
        if prompts and lane in starting:
            _try_each(state, policy.order_ahead(state, lane, now, prompts), planner.starts.start)
        _try_each(state, prompts, planner.advance)
        if planner.starts.takes_new and lane in starting:
            _try_each(state, policy.order_waiting(state, lane, now), planner.starts.start)
    for lane in starting:
        planner.fetch_ahead(lane, policy.order_fetches(state, lane, now))
        planner.prepare_ahead(lane, policy.order_fetches(state, lane, now))
    return planner.finish()


def _try_each(state: EngineState, sequences: Iterable[Sequence], schedule: Callable[[Sequence], bool]) -> None:
    """Schedule the sequences, in their order, until `schedule` returns False, without suspects on trial."""
    has_suspects = bool(state.suspects)
    for seq in sequences:
        if not (has_suspects and seq.on_trial) and not schedule(seq):
            return


def plan_trial(state: EngineState, policy: Policy, now: float) -> StepPlan | None:
    """Return a plan that computes one suspect request alone; None means that no suspect on trial can be computed now.
    The trial of a running suspect ends before the next trial begins. While a running suspect has to wait for its own
    pending token, the returned plan has no chunks, so that no other request is computed in the same step."""
    on_trial = [seq for seq in state.suspects.values() if seq.on_trial]
    running = [seq for seq in on_trial if seq.id in state.running]
    for seq in running or on_trial:
        planner = Planner(state, policy, now)
        planner.enter(seq.lane)
        if running:
            planner.advance(seq)
        elif state.waiting.modes[seq.lane] is not LaneMode.PAUSED:
            planner.starts.start(seq)
        plan = planner.finish()
        if plan.chunks or (running and seq.waits_for_token):
            return plan
    return None


class Planner:
    """Builds one StepPlan from a state and a policy, and changes neither. For each lane, the caller calls `enter`, then
    `advance` for running and `starts.start` for waiting sequences; then `fetch_ahead` and `prepare_ahead` prepare later
    starts, and `finish` returns the plan. What the plan has taken and freed so far is tracked, so that each addition
    still fits."""

    def __init__(self, state: EngineState, policy: Policy, now: float) -> None:
        self._state = state
        self._block_size = state.config.block_size
        self._now = now
        self._overlays = overlays = Overlays.of(state, now, timed=policy.timed)
        self._budget, self._pages, self._chunks = overlays.budget, overlays.pages, overlays.chunks
        self._clearing = Clearing(state, policy, overlays)
        self.starts = Starts(state, now, overlays, self._clearing, gathers=policy.gathers)

    def enter(self, lane: Lane) -> None:
        """Begin to plan a lane's part of the step: further calls of `advance` and `starts.start` are for sequences of
        this lane, within the time limit that the step's budget sets for the lane."""
        self._budget.enter(lane)
        self.starts.enter(lane)

    def in_turn(self, decodes: list[Sequence]) -> list[Sequence]:
        """Return which of the current lane's running `decodes` are to advance, in order: all, unless they take turns
        (see plan/turns.py)."""
        return self._budget.in_turn(decodes)

    def advance(self, seq: Sequence) -> bool:
        """Schedule the next chunk of a running sequence, as far as the budget grants tokens. If no room can be made for
        its new pages, the sequence is preempted. Nothing happens to one that is preempted or waits for a token
        or a mask. Returns whether sequences after it may still get tokens; False means that the lane gets no more in
        this plan."""
        if (seq.num_pending and seq.waits_for_token) or seq.id in self._clearing.preempted:
            return True
        if seq.masks_slowly and self._state.grammars.masks.blocks(seq):
            return True
        start = seq.num_computed
        left = len(seq.tokens) + seq.num_pending - start
        count = self._budget.grant(seq, start, left)
        if not count:
            return self._budget.is_open
        missing = -(-(start + count) // self._block_size) - len(seq.pages)
        if missing <= 0:
            self._chunks[seq.id] = ScheduledChunk(seq.id, start, count, (), count == left)
        elif self._clearing.make(Room(missing), seq):
            pages = self._pages.take(missing, self._clearing.takes_as(seq))
            self._chunks[seq.id] = ScheduledChunk(seq.id, start, count, pages, count == left)
        else:
            self._budget.take_back(seq, start, count)
            self._clearing.preempt(seq, Cause.PAGES)
        return True

    def fetch_ahead(self, lane: Lane, waiting: Iterable[Sequence]) -> None:
        """Plan fetches, from disk to host memory, of the missing adapters of a lane's first `prefetch_window` sequences
        in `waiting` that this plan does not start, as far as fetches and host memory are free, and keep the host copies
        that the others of these sequences need."""
        if not self._overlays.fetches.is_open(lane):
            return
        still_waiting = (seq for seq in waiting if seq.id not in self.starts.admitted)
        for seq in islice(still_waiting, self._state.config.prefetch_window):
            adapter = self._state.adapters.get(seq.request.adapter_hash or "")
            if adapter is None:
                continue
            if adapter.is_missing:
                self._overlays.fetches.fetch(adapter, is_old=self.starts.is_old(seq))
            self._overlays.fetches.kept.add(adapter.adapter_hash)
            if not self._overlays.fetches.is_open(lane):
                return

    def prepare_ahead(self, lane: Lane, waiting: Iterable[Sequence]) -> None:
        """Plan to prepare, concurrently with steps, the grammars of a lane's first `prefetch_window` sequences in
        `waiting`, as far as preparations and memory are free, so that these sequences need not wait for their grammars
        later."""
        if self._overlays.grammars.is_open(lane):
            for seq in islice(waiting, self._state.config.prefetch_window):
                self._overlays.grammars.prepare(seq.request, lane)

    def finish(self) -> StepPlan:
        """Return the plan, with the evictions, copies and proposals that nothing in the step waits for."""
        state, host, budget, preempted = self._state, self._overlays.host, self._budget, self._clearing.preempted
        self._overlays.adapters.evict_closed()
        self._overlays.fetches.drop_closed()
        if state.moves.exports:
            most = max(1, budget.copies_beside(state.config.num_pages))
            budget.move_pages(host.export(most, state.movable_pages))
        budget.move_pages(host.checkpoint(preempted))
        budget.move_pages(self._keep_evicted())
        drafts, drafting_s = self._speculate() if state.config.speculation else ((), 0.0)
        return StepPlan(
            now=self._now,
            forecast=self._forecast(drafting_s),
            saves=tuple(host.saved.values()),
            kept=KeptKv(tuple(host.saved), tuple(host.checkpoints.items()), tuple(host.exports.items())),
            released=(*state.steps.released, *preempted),
            preempted=tuple(preempted),
            causes=tuple(self._clearing.causes),
            dropped_cache=tuple(self._pages.dropped),
            adapters=self._adapter_moves(),
            grammars=self._grammar_work(),
            forks=tuple(self.starts.forks),
            restores=tuple(self.starts.restores),
            admitted=tuple(self.starts.admitted.values()),
            chunks=tuple(self._chunks.values()),
            undrafted=tuple([name for name in self._pages.undrafted if name not in preempted]),
            drafts=drafts,
        )

    def _forecast(self, drafting_s: float) -> StepForecast:
        """Return what is predicted of the step, which spends `drafting_s` seconds on drafting."""
        ledger, features = self._state.ledger, self._budget.features
        if not self._chunks:
            return StepForecast(0.0, features, self._budget.alone)
        sequences = self._state.sequences
        masks_s = ledger.token_prices.masks_s(sequences[name] for name in self._chunks)
        return StepForecast(ledger.model.predict(features) + drafting_s + masks_s, features, self._budget.alone)

    def _adapter_moves(self) -> AdapterMoves:
        adapters, fetches = self._overlays.adapters, self._overlays.fetches
        return AdapterMoves(
            tuple(adapters.evicted),
            tuple(adapters.loads.values()),
            tuple(fetches.dropped),
            tuple(fetches.fetches.values()),
            fetches.cancelled(),
        )

    def _grammar_work(self) -> GrammarWork:
        prepared, grammars = self._overlays.grammars.prepared, self._state.grammars
        return GrammarWork(
            tuple(grammars.forgotten),
            tuple(prepared),
            tuple([request.id for request in prepared.values()]),
            grammars.masks.choose(self._now, self._clearing.preempted, computes=bool(self._chunks)),
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
        price, saving = 2 * ledger.model.prices.page, self._block_size * ledger.token_prices.prefill
        if price >= saving:
            return 0
        more = min(self._budget.copies_beside(len(pages)), self._saves_to_try(price, saving))
        return self._overlays.host.evicted(pages, len(self.starts.restores) + more)

    def _saves_to_try(self, price: float, saving: float) -> int:
        """Return how many evicted pages may be saved although they may never be restored: as many as the host tier has,
        once, and then as many as fit, at `price` seconds each, into the time that the pages restored so far have saved
        (`saving` seconds each) plus `TRIED_SHARE` of the device's time. Where prompts never begin alike, saves would
        otherwise cost a simulated H100 4 % of its throughput."""
        counters, host = self._state.counters, self._state.host
        earned = counters.kv.restored * saving + TRIED_SHARE * sum(self._state.ledger.busy.values())
        return max(0, host.num_pages - counters.kv.saved + int(earned / price)) if price else host.num_pages

    def _speculate(self) -> tuple[tuple[DraftAsk, ...], float]:
        """Add proposals to the chunks, and return what the draft model, if there is one, shall do after the step, with
        its predicted seconds."""
        alone = self._state.ledger.model.predict(self._budget.features)
        add_proposals(self._state, self._chunks, self._budget, self._pages)
        if not self._state.config.draft_block:
            return (), 0.0
        drafts, seconds = ask_drafts(self._state, self._chunks, self._budget, self._pages, alone)
        self._budget.alone += seconds if self._budget.alone else 0.0
        return drafts, seconds
