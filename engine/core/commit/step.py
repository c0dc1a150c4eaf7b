"""Changes to the engine state: committing plans, absorbing their results, and ending requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from engine.core.commit.adapters import (
    adapter_wait,
    forget_closed,
    move_adapters,
    note_loads,
    start_adapter,
    use_adapter,
)
from engine.core.commit.masks import await_masks
from engine.core.commit.moves import cancel_imports, lease_exports, offer_pages
from engine.core.config import goal_of
from engine.core.messages.prompt_logprobs import row_bytes
from engine.core.messages.requests import AdapterHash, ErrorCode, FinishReason, Lane, PageId, Refusal, TokenEvent
from engine.core.messages.step import Admission, PromptRows, SampledToken, StepPlan, StepResult
from engine.core.plan.proposals import count_proposed, count_refused, note_proposals
from engine.core.state.engine_state import EngineState
from engine.core.state.page_keys import page_keys, tail_key
from engine.core.state.sequence import Sequence
from engine.core.state.under_way import StepUnderWay, follow

Entry = TypeVar("Entry", bound=tuple[Any, ...])


def abort_users(state: EngineState, adapter_hash: AdapterHash) -> int:
    """Abort all live requests of a dropped adapter, each with an ABORT event, and return their number; 0 if the adapter
    was not dropped."""
    if adapter_hash not in state.tiers.closing:
        return 0
    users = [seq for seq in state.sequences.values() if seq.request.adapter_hash == adapter_hash]
    for seq in users:
        abort(state, seq)
    return len(users)


def abort(state: EngineState, seq: Sequence) -> None:
    """End a live request that its client has abandoned or whose adapter was dropped, with an ABORT event, and free all
    that it holds."""
    finish(state, seq, TokenEvent(seq.id, finish_reason=FinishReason.ABORT))


def finish_early(state: EngineState, seq: Sequence, refusal: Refusal) -> None:
    """End a live request with an ERROR event that carries `refusal` to the client, and free all that it holds."""
    finish(state, seq, TokenEvent(seq.id, finish_reason=FinishReason.ERROR, refusal=refusal))


def commit(state: EngineState, plan: StepPlan) -> None:
    """Apply a plan to the state before the executor runs it: preempt and start sequences, move pages and adapters,
    begin preparations of grammars, count chunks as computed, and append the step to `under_way`. This cannot fail,
    because the plan was made to fit this state."""
    state.now, state.in_flight = plan.now, plan
    _note_saves(state, plan)
    for request_id in plan.undrafted:
        _release_pages(state, state.sequences[request_id].drafting.clear())
    for request_id, cause in zip(plan.preempted, plan.causes, strict=True):
        seq = state.sequences[request_id]
        _preempt(state, seq)
        state.counters.preempted_for[cause] += 1
        state.counters.preempted_in[seq.request.lane] += 1
    state.host.touch(state.host.key_of[copy.host_page] for copy in plan.restores)
    for page in plan.dropped_cache:
        state.host.touch([state.prefix.key_of[page]])
        state.prefix.drop(page)
        state.pool.reclaim([page])
    move_adapters(state, plan)
    state.grammars.forgotten.clear()
    for grammar, request_id in zip(plan.prepared, plan.prepared_for, strict=True):
        request = state.sequences[request_id].request
        state.grammars.begin(grammar, request.tenant, request.weight)
    for admission in plan.admitted:
        _admit(state, admission)
    for request_id in plan.masks:
        state.masks.begin(request_id)
    state.counters.pages_restored += len(plan.restores)
    step = follow(plan, state.sequences)
    _advance(state, step)
    for ask in plan.drafts:
        state.pool.acquire(ask.new_pages)
        state.sequences[ask.request_id].drafting.pages.extend(ask.new_pages)
    state.under_way.append(step)
    state.released.clear()
    state.prefix.decay(plan.now - state.config.scheduling.hold_s, state.most_held)
    state.counters.steps += 1


def absorb(state: EngineState, result: StepResult, now: float) -> list[TokenEvent]:
    """Apply the result of the oldest step under way, and remove and return all events in the outbox. Logprobs of
    prompts are passed on and sampled tokens are appended to their sequences if these still live, the device time is
    charged to tenants, sequences that reached their end or failed are ended, unused dropped adapters are
    forgotten, and the ledger learns from the duration. `now` is in seconds on the engine's clock."""
    step = state.under_way.popleft()
    state.now, state.absorbed = now, step.plan
    wants_batch = state.may_start(Lane.BATCH) or any(s.lane is Lane.BATCH for s in state.running.values())
    began = step.plan.now if result.seconds is None else now - result.seconds
    refused: dict[str, int] = {}
    if state.config.speculation:
        count_proposed(state, step)
        refused = count_refused(step.plan, result)
    state.ledger.settle(
        step,
        state.adapters,
        began,
        now,
        refused,
        wants_batch=wants_batch,
        launched=result.launched,
        draft_seconds=result.draft_seconds,
        mask_seconds=result.mask_seconds,
    )
    update_need(state, now)
    _measure(state, step, began)
    note_loads(state, step.plan.loads, result.load_seconds)
    for seq, scored in _still_live(state, step, result.scored):
        _pass_on(state, seq, scored, now)
    for seq, sample in _still_live(state, step, result.sampled):
        _append(state, seq, sample, now)
    for seq, pooled in _still_live(state, step, result.pooled):
        _end_pooled(state, seq, pooled.vector, now)
    for seq, (_, refusal) in _still_live(state, step, result.failed):
        if refusal.code is ErrorCode.MODEL_OUTPUT_INVALID:
            _distrust_pages(state, seq)
        finish_early(state, seq, refusal)
    await_masks(state, step, result)
    if state.config.speculation:
        note_proposals(state, step, refused, result)
    forget_closed(state)
    offer_pages(state, step.plan)
    state.ledger.adapt(state.config.interactive.attainment)
    events = list(state.outbox)
    state.outbox.clear()
    return events


def _still_live(state: EngineState, step: StepUnderWay, entries: Iterable[Entry]) -> Iterator[tuple[Sequence, Entry]]:
    """Yield those of a result's `entries`, which begin with the id of a request, whose request has not ended since the
    step was planned, each with its sequence. An entry may end the request of later ones."""
    for entry in entries:
        seq = step.sequences[entry[0]]
        if state.is_live(seq):
            yield seq, entry


def _distrust_pages(state: EngineState, seq: Sequence) -> None:
    """Take the pages of a sequence whose output was invalid out of the prefix cache, on the device and on the host,
    because their KV may be invalid, too."""
    for page in seq.pages:
        if page in state.prefix.key_of:
            state.prefix.drop(page)
    state.host.forget(seq.page_keys)


def _measure(state: EngineState, step: StepUnderWay, began: float) -> None:
    """Add to the metrics a step's numbers of sequences and tokens, and how long the interactive requests that it starts
    and that only batch work delayed had waited. The step began at `began`, in seconds on the engine's clock."""
    counters, plan = state.counters, step.plan
    if plan.chunks:
        counters.step_sequences.add(len(plan.chunks))
        counters.step_tokens.add(plan.num_tokens)
    for admission in plan.admitted:
        seq = step.sequences.get(admission.request_id)
        if seq is not None and seq.only_batch_delays:
            seq.only_batch_delays = False
            counters.yield_seconds.add(max(0.0, began - seq.request.arrival))


def _note_saves(state: EngineState, plan: StepPlan) -> None:
    for key, copy in zip(plan.saved_keys, plan.saves, strict=True):
        state.host.put(key, copy.host_page)
    for request_id, num_saved in plan.checkpoints:
        seq = state.sequences[request_id]
        state.host.need(seq.page_keys[seq.num_saved : num_saved])
        seq.num_saved = num_saved
    state.counters.pages_saved += len(plan.saves)
    lease_exports(state, plan)


def _preempt(state: EngineState, seq: Sequence) -> None:
    seq.num_lost = seq.num_computed
    seq.num_paid = max(seq.num_paid, seq.num_computed)
    seq.num_preemptions += 1
    _stop_running(state, seq)
    state.waiting.add(seq)


def _stop_running(state: EngineState, seq: Sequence) -> None:
    """Free the pages and the adapter of a running sequence, and remove it from the running ones. Pages in the prefix
    cache become idle unless other sequences use them."""
    del state.running[seq.id]
    state.masks.leave(seq)
    state.prefix.break_promises(seq.page_keys, seq.id)
    _withdraw_tail(state, seq)
    _release_pages(state, seq.pages)
    _release_pages(state, seq.drafting.clear())
    seq.pages, seq.num_computed = [], 0
    use_adapter(state, seq, running=-1)


def _release_pages(state: EngineState, pages: list[PageId]) -> None:
    unreferenced = state.pool.release(pages)
    state.pool.reclaim(state.prefix.park(unreferenced, state.now))


def _admit(state: EngineState, admission: Admission) -> None:
    seq = state.sequences[admission.request_id]
    _stop_waiting(state, seq)
    state.running[seq.id] = seq
    state.prefix.unpark(list(admission.pages), seq.lane)
    state.pool.acquire(admission.pages)
    seq.pages, seq.num_computed = list(admission.pages), admission.num_computed
    _register(state, seq, 0)
    _offer_tail(state, seq, 0)
    if state.config.prefix_caching:
        state.prefix.promise(seq.page_keys, seq.id)
    start_adapter(state, seq, state.in_flight)
    if seq.num_preemptions:
        state.counters.recomputed_tokens += max(0, seq.num_lost - seq.num_computed)
    else:
        seq.num_cached = seq.num_computed
        state.counters.cached_tokens += seq.num_cached
        state.counters.prompt_tokens += min(seq.num_cached, len(seq.request.prompt_ids))
        waits = (max(0.0, state.now - seq.request.arrival), adapter_wait(state, seq))
        is_loaded = any(load.request_id == seq.id for load in state.in_flight.loads)
        seq.only_batch_delays = seq.only_batch_delays and not (waits[1] or is_loaded)
        state.outbox.append(TokenEvent(seq.id, num_cached=seq.num_cached, wait=waits[0], adapter_wait=waits[1]))


def _stop_waiting(state: EngineState, seq: Sequence) -> None:
    state.waiting.remove(seq)
    waiting = state.waiting.groups(seq.lane)
    if seq.request.party not in waiting:
        state.ledger.accounts.leave(seq.request.lane, seq.request.party, waiting)


def _advance(state: EngineState, step: StepUnderWay) -> None:
    """Give the sequences of a step the new pages of their chunks, count the chunks as computed, without proposals, and
    the tokens that they sample as pending, and register full pages. This is safe before the step has run, because the
    steps of later plans run after it. Proposals count as computed once they are accepted; later steps overwrite the KV
    of the others."""
    size = state.config.block_size
    for chunk, seq in zip(step.plan.chunks, step.owners, strict=True):
        _, before, count, new_pages, samples, proposals, _ = chunk
        if new_pages:
            state.pool.acquire(new_pages)
            seq.pages.extend(new_pages)
        seq.num_computed = computed = before + count - len(proposals)
        seq.num_pending += samples
        if before < len(seq.request.prompt_ids):
            _note_prompt(state, seq, before)
        if computed // size > before // size:
            _register(state, seq, before)


def _note_prompt(state: EngineState, seq: Sequence, before: int) -> None:
    """Add to the statistics the prompt tokens of a sequence that were computed after its first `before` tokens, except
    those that were computed again after a preemption, and let other sequences copy the end of its prompt (see
    `_offer_tail`)."""
    computed = min(seq.num_computed, len(seq.request.prompt_ids))
    state.counters.prompt_tokens += max(0, computed - max(before, seq.num_paid))
    _offer_tail(state, seq, before)


def _register(state: EngineState, seq: Sequence, before: int) -> None:
    """Add to the prefix cache the pages of a sequence that have become full since `before` tokens were computed. A page
    is full when all of its tokens are known and computed, or planned to be. Without prefix caching, none is added."""
    size = state.config.block_size
    first, last = before // size, min(seq.num_computed, len(seq.tokens)) // size
    if first == last or not state.config.prefix_caching:
        return
    keys = page_keys(seq, last, size)
    for key, page in zip(keys[first:], seq.pages[first:], strict=False):
        state.prefix.register(key, page, seq.lane)


def _offer_tail(state: EngineState, seq: Sequence, before: int) -> None:
    """Let other sequences with the same prompt copy the page with the end of this sequence's prompt, if that end was
    not among the first `before` tokens and now counts as computed. This is safe before the step that computes the page
    has run, because the steps that copy it run later."""
    if state.config.prefix_caching and before < len(seq.request.prompt_ids) - 1 <= seq.num_computed:
        key = tail_key(seq, state.config.block_size)
        if key is not None:
            state.prefix.tails[key] = seq.id


def _withdraw_tail(state: EngineState, seq: Sequence) -> None:
    key = tail_key(seq, state.config.block_size) if state.prefix.tails else None
    if key is not None and state.prefix.tails.get(key) == seq.id:
        del state.prefix.tails[key]


def _append(state: EngineState, seq: Sequence, sample: SampledToken, now: float) -> None:
    if seq.num_pending:
        seq.num_pending -= 1
    else:  # it follows a proposal that was accepted, whose KV the step has computed
        seq.num_computed += 1
        seq.tally.accept()
        state.counters.accepted_tokens += 1
        _register(state, seq, seq.num_computed - 1)
    seq.tokens.append(sample.token)
    state.counters.generated_tokens += 1
    state.ledger.note_token(seq, now)
    config, request = state.config, seq.request
    seq.due = now + goal_of(request.itl, config.goals[request.lane].itl_s)
    _note_use(state, seq, now)
    logprobs = (sample.logprobs,) if sample.logprobs else ()
    reason = finish_reason(seq, config.eos_token_ids, config.max_model_len)
    event = TokenEvent(
        seq.id,
        (sample.token,),
        logprobs,
        reason,
        seq.num_cached,
        device_seconds=seq.device_seconds,
        proposals=seq.tally.counts,
    )
    if reason is None:
        if seq.num_computed == len(seq.tokens):  # planned ahead, when the token was still pending
            _register(state, seq, seq.num_computed - 1)
        state.outbox.append(event)
    else:
        finish(state, seq, event)


def _note_use(state: EngineState, seq: Sequence, now: float) -> None:
    """Set the time at which the adapter of a sequence was last used to `now`, in seconds on the engine's clock. Without
    an adapter, do nothing."""
    if seq.request.adapter_hash:
        state.adapters[seq.request.adapter_hash].last_used = now


def _pass_on(state: EngineState, seq: Sequence, scored: PromptRows, now: float) -> None:
    """Send the client the logprobs of prompt tokens that it has not received: after a preemption, rows may be computed
    again. A request that generates no tokens ends once all of its rows are sent."""
    size = row_bytes(seq.request.params.prompt_logprobs or 0)
    rows = scored.rows[(seq.num_scored - scored.start) * size :]
    seq.num_scored += len(rows) // size
    event = TokenEvent(seq.id, num_cached=seq.num_cached, device_seconds=seq.device_seconds, prompt_logprobs=rows)
    if seq.is_scored and not seq.request.params.max_tokens:
        _note_use(state, seq, now)
        finish(state, seq, event._replace(finish_reason=FinishReason.LENGTH))
    elif rows:
        state.outbox.append(event)


def _end_pooled(state: EngineState, seq: Sequence, vector: bytes, now: float) -> None:
    _note_use(state, seq, now)
    event = TokenEvent(seq.id, finish_reason=FinishReason.POOLED, device_seconds=seq.device_seconds, vector=vector)
    finish(state, seq, event)


def finish(state: EngineState, seq: Sequence, event: TokenEvent) -> None:
    """End a live request: free all that it holds, forget its sequence, and append `event` to the outbox for the client.
    Every end of a request passes through this function. If the sequence was running, the next plan tells the executor
    to release it."""
    if seq.id in state.running:
        _stop_running(state, seq)
        state.released.append(seq.id)
    else:
        _stop_waiting(state, seq)
    cancel_imports(state, seq.id)
    state.host.end_need(seq.page_keys[: seq.num_saved])
    if seq.num_generated > len(seq.request.produced):
        state.lengths.learn(seq.request, seq.num_generated)
    if seq.proposer is not None:
        seq.proposer.end(seq.tokens)
        state.drafts.end(seq.request.adapter_hash, seq.drafting)
    del state.sequences[seq.id]
    state.ledger.accounts.end(seq.request, state.ledger.settled)
    state.suspects.pop(seq.id, None)
    use_adapter(state, seq, live=-1)
    state.grammars.leave(seq.request.params.grammar)
    state.outbox.append(event)


def finish_reason(seq: Sequence, eos_token_ids: tuple[int, ...], max_model_len: int) -> FinishReason | None:
    """Return why the newest token ends the sequence: STOP for a stop token or, unless `ignore_eos`, an EOS token from
    token number `min_tokens` on, LENGTH at `max_tokens` or `max_model_len`. None means that the sequence goes on. With
    a grammar, an EOS token always ends it, because no token may follow."""
    params, token, generated = seq.request.params, seq.tokens[-1], seq.num_generated
    if params.grammar is not None and token in eos_token_ids:
        return FinishReason.STOP
    stops = token in params.stop_token_ids or (token in eos_token_ids and not params.ignore_eos)
    if stops and generated >= params.min_tokens:
        return FinishReason.STOP
    if generated >= params.max_tokens or len(seq.tokens) >= max_model_len:
        return FinishReason.LENGTH
    return None


INTERVAL_S = 0.25
SECONDS_PER_SEQUENCE = 1e-4
"""Two updates of `ledger.need` are at least `INTERVAL_S` seconds apart, and this many seconds for each sequence with a
deadline. Looking at a sequence takes one or two microseconds, so the updates take about 2 % of the time at most."""
DEADLINE_MARGIN = 0.05
"""Share of the time left until a deadline that is kept as a reserve."""


def update_need(state: EngineState, now: float) -> None:
    """Recompute `ledger.need`, the device time that batch deadlines need as a multiple of what batch work has been
    getting, if the last update is long enough ago. `now` is in seconds on the engine's clock. The need is the maximum
    over all deadlines of (device seconds of work due by the deadline / time left, less a margin / share of device time
    that batch work has been getting, at least `batch_floor`). Work whose deadline has passed does not count, because it
    is late already and must not make other work late. Nor does waiting work of a paused lane."""
    ledger = state.ledger
    if now < ledger.need_known_until:
        return
    due = _with_deadlines(state, now)
    ledger.need_known_until = now + max(INTERVAL_S, SECONDS_PER_SEQUENCE * len(due))
    ledger.need = _need(state, due, now)


def _with_deadlines(state: EngineState, now: float) -> list[tuple[float, Sequence]]:
    running = [seq for seq in state.running.values() if seq.request.deadline is not None]
    waiting = state.waiting.urgent if state.may_start(Lane.BATCH) else ()
    due = [(seq.request.deadline or 0.0, seq) for seq in (*waiting, *running)]
    return sorted((item for item in due if item[0] > now), key=lambda item: item[0])


def _need(state: EngineState, due: list[tuple[float, Sequence]], now: float) -> float:
    ledger = state.ledger
    rate = max(ledger.batch_share, state.config.scheduling.batch_floor, 1e-9)
    need = work = 0.0
    for deadline, seq in due:
        work += ledger.work_left(seq)
        need = max(need, work / ((deadline - now) * (1 - DEADLINE_MARGIN) * rate))
    return need
