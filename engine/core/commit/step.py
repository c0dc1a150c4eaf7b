"""Changes to the engine state by steps: committing plans and absorbing their results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from engine.core.commit.adapters import forget_closed, move_adapters, note_loads
from engine.core.commit.moves import lease_exports, offer_pages
from engine.core.commit.sequences import (
    admit,
    await_masks,
    finish,
    finish_early,
    finish_reason,
    offer_tail,
    preempt,
    register,
    release_pages,
)
from engine.core.config import goal_of
from engine.core.messages.prompt_logprobs import row_bytes
from engine.core.messages.requests import ErrorCode, FinishReason, Lane, TokenEvent
from engine.core.messages.step import PromptRows, SampledToken, StepPlan, StepResult
from engine.core.plan.proposals import count_proposed, count_refused, note_proposals
from engine.core.state.engine_state import EngineState
from engine.core.state.ledger import StepUnderWay, follow
from engine.core.state.sequence import Sequence

Entry = TypeVar("Entry", bound=tuple[Any, ...])


def commit(state: EngineState, plan: StepPlan) -> None:
    """Apply a plan to the state before the executor runs it: preempt and start sequences, move pages and adapters,
    begin preparations of grammars, count chunks as computed, and append the step to `under_way`. This cannot fail,
    because the plan was made to fit this state."""
    state.steps.now, state.steps.in_flight = plan.now, plan
    _note_saves(state, plan)
    for request_id in plan.undrafted:
        release_pages(state, state.sequences[request_id].speculation.drafting.clear())
    for request_id, cause in zip(plan.preempted, plan.causes, strict=True):
        seq = state.sequences[request_id]
        preempt(state, seq)
        state.counters.preempted_for[cause] += 1
        state.counters.preempted_in[seq.request.lane] += 1
    if plan.restores:
        state.host.touch(state.host.key_of[copy.host_page] for copy in plan.restores)
    for page in plan.dropped_cache:
        state.host.touch([state.prefix.key_of[page]])
        state.prefix.drop(page)
        state.pool.reclaim([page])
    move_adapters(state, plan)
    state.grammars.forgotten.clear()
    for grammar, request_id in zip(plan.grammars.prepared, plan.grammars.prepared_for, strict=True):
        request = state.sequences[request_id].request
        state.grammars.begin(grammar, request.tenant, request.weight)
    for admission in plan.admitted:
        admit(state, admission)
    for request_id in plan.grammars.masks:
        state.grammars.masks.begin(request_id)
    state.counters.kv.restored += len(plan.restores)
    step = follow(plan, state.sequences)
    _advance(state, step)
    for ask in plan.drafts:
        state.pool.acquire(ask.new_pages)
        state.sequences[ask.request_id].speculation.drafting.pages.extend(ask.new_pages)
    state.steps.under_way.append(step)
    state.steps.released.clear()
    state.prefix.decay(plan.now - state.config.scheduling.hold_s, state.most_held)
    state.counters.steps += 1


def absorb(state: EngineState, result: StepResult, now: float) -> list[TokenEvent]:
    """Apply the result of the oldest step under way, and remove and return all events in the outbox. Logprobs of
    prompts are passed on and sampled tokens are appended to their sequences if these still live, the device time is
    charged to tenants, sequences that reached their end or failed are ended, unused dropped adapters are
    forgotten, and the ledger learns from the duration. `now` is in seconds on the engine's clock."""
    step = state.steps.under_way.popleft()
    state.steps.now, state.steps.absorbed = now, step.plan
    wants_batch = state.may_start(Lane.BATCH) or any(s.lane is Lane.BATCH for s in state.running.values())
    began = step.plan.now if result.seconds is None else now - result.seconds
    refused: dict[str, int] = {}
    if state.config.speculation:
        count_proposed(state, step)
        refused = count_refused(step.plan, result)
    state.ledger.settle(step, result, state.adapters, began, now, refused, wants_batch=wants_batch)
    update_need(state, now)
    _measure(state, step, began)
    note_loads(state, step.plan.adapters.loads, result.load_seconds)
    for seq, scored in _still_live(state, step, result.scored):
        _pass_on(state, seq, scored, now)
    goals = state.config.goals
    for seq, sample in _still_live(state, step, result.sampled):
        _append(state, seq, sample, now, goals[seq.request.lane].itl_s)
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
    if state.moves.exports:
        offer_pages(state, step.plan)
    state.ledger.courtesy.adapt(state.config.interactive.attainment)
    events = list(state.outbox)
    state.outbox.clear()
    return events


def _still_live(state: EngineState, step: StepUnderWay, entries: Iterable[Entry]) -> Iterator[tuple[Sequence, Entry]]:
    """Yield those of a result's `entries`, which begin with the id of a request, whose request has not ended since the
    step was planned, each with its sequence. An entry may end the request of later ones."""
    planned, live = step.sequences, state.sequences
    for entry in entries:
        seq = planned[entry[0]]
        if live.get(seq.id) is seq:  # as `is_live` says, which a step would call hundreds of times
            yield seq, entry


def _distrust_pages(state: EngineState, seq: Sequence) -> None:
    """Take the pages of a sequence whose output was invalid out of the prefix cache, on the device and on the host,
    because their KV may be invalid, too."""
    for page in seq.pages:
        if page in state.prefix.key_of:
            state.prefix.drop(page)
    state.host.forget(seq.prefix.keys)


def _measure(state: EngineState, step: StepUnderWay, began: float) -> None:
    """Add to the metrics a step's numbers of sequences and tokens, and how long the interactive requests that it starts
    and that only batch work delayed had waited. The step began at `began`, in seconds on the engine's clock."""
    counters, plan = state.counters, step.plan
    if plan.chunks:
        counters.step_sequences.add(len(plan.chunks))
        counters.step_tokens.add(plan.num_tokens)
    for admission in plan.admitted:
        seq = step.sequences.get(admission.request_id)
        if seq is not None and seq.forecast.only_batch_delays:
            seq.forecast.only_batch_delays = False
            counters.yield_seconds.add(max(0.0, began - seq.request.arrival))


def _note_saves(state: EngineState, plan: StepPlan) -> None:
    for key, copy in zip(plan.kept.keys, plan.saves, strict=True):
        state.host.put(key, copy.host_page)
    for request_id, num_saved in plan.kept.checkpoints:
        seq = state.sequences[request_id]
        state.host.need(seq.prefix.keys[seq.prefix.num_saved : num_saved])
        seq.prefix.num_saved = num_saved
    state.counters.kv.saved += len(plan.saves)
    if plan.kept.exports:
        lease_exports(state, plan)


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
            register(state, seq, before)


def _note_prompt(state: EngineState, seq: Sequence, before: int) -> None:
    """Add to the statistics the prompt tokens of a sequence that were computed after its first `before` tokens, except
    those that were computed again after a preemption, and let other sequences copy the end of its prompt (see
    `offer_tail`)."""
    computed = min(seq.num_computed, len(seq.request.prompt_ids))
    state.counters.prompt_tokens += max(0, computed - max(before, seq.preempted.num_paid))
    offer_tail(state, seq, before)


def _append(state: EngineState, seq: Sequence, sample: SampledToken, now: float, itl_s: float) -> None:
    """Append a sampled token to its sequence, which ends if the token is the last. `itl_s` is the ITL goal of the
    sequence's lane in seconds."""
    if seq.num_pending:
        seq.num_pending -= 1
    else:  # it follows a proposal that was accepted, whose KV the step has computed
        seq.num_computed += 1
        seq.speculation.tally.accept()
        state.counters.accepted_tokens += 1
        register(state, seq, seq.num_computed - 1)
    seq.tokens.append(sample.token)
    state.counters.generated_tokens += 1
    state.ledger.note_token(seq, now)
    config, request = state.config, seq.request
    seq.due = now + goal_of(request.itl, itl_s)
    if request.adapter_hash:
        state.adapters[request.adapter_hash].last_used = now
    logprobs = (sample.logprobs,) if sample.logprobs else ()
    reason = finish_reason(seq, config.eos_token_ids, config.max_model_len)
    event = TokenEvent(
        seq.id,
        (sample.token,),
        logprobs,
        reason,
        seq.prefix.num_cached,
        device_seconds=seq.device_seconds,
        proposals=seq.speculation.tally.counts,
    )
    if reason is None:
        if seq.num_computed == len(seq.tokens):  # planned ahead, when the token was still pending
            register(state, seq, seq.num_computed - 1)
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
    cached, seconds = seq.prefix.num_cached, seq.device_seconds
    event = TokenEvent(seq.id, num_cached=cached, device_seconds=seconds, prompt_logprobs=rows)
    if seq.is_scored and not seq.request.params.max_tokens:
        _note_use(state, seq, now)
        finish(state, seq, event._replace(finish_reason=FinishReason.LENGTH))
    elif rows:
        state.outbox.append(event)


def _end_pooled(state: EngineState, seq: Sequence, vector: bytes, now: float) -> None:
    _note_use(state, seq, now)
    event = TokenEvent(seq.id, finish_reason=FinishReason.POOLED, device_seconds=seq.device_seconds, vector=vector)
    finish(state, seq, event)


INTERVAL_S = 0.25
SECONDS_PER_SEQUENCE = 1e-4
"""Two updates of `BatchTime.need` are at least `INTERVAL_S` seconds apart, and this many seconds for each sequence with
a deadline. Looking at a sequence takes one or two microseconds, so the updates take about 2 % of the time at most."""
DEADLINE_MARGIN = 0.05
"""Share of the time left until a deadline that is kept as a reserve."""


def update_need(state: EngineState, now: float) -> None:
    """Recompute `BatchTime.need`, the device time that batch deadlines need as a multiple of what batch work has been
    getting, if the last update is long enough ago. `now` is in seconds on the engine's clock. The need is the maximum
    over all deadlines of (device seconds of work due by the deadline / time left, less a margin / share of device time
    that batch work has been getting, at least `batch_floor`). Work whose deadline has passed does not count, because it
    is late already and must not make other work late. Nor does waiting work of a paused lane."""
    batch = state.ledger.batch
    if now < batch.need_known_until:
        return
    due = _with_deadlines(state, now)
    batch.need_known_until = now + max(INTERVAL_S, SECONDS_PER_SEQUENCE * len(due))
    batch.need = _need(state, due, now)


def _with_deadlines(state: EngineState, now: float) -> list[tuple[float, Sequence]]:
    running = [seq for seq in state.running.values() if seq.request.deadline is not None]
    waiting = state.waiting.urgent if state.may_start(Lane.BATCH) else ()
    due = [(seq.request.deadline or 0.0, seq) for seq in (*waiting, *running)]
    return sorted((item for item in due if item[0] > now), key=lambda item: item[0])


def _need(state: EngineState, due: list[tuple[float, Sequence]], now: float) -> float:
    ledger = state.ledger
    rate = max(ledger.batch.share, state.config.scheduling.batch_floor, 1e-9)
    need = work = 0.0
    for deadline, seq in due:
        work += ledger.token_prices.work_left(seq)
        need = max(need, work / ((deadline - now) * (1 - DEADLINE_MARGIN) * rate))
    return need
