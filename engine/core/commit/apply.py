"""Changes the state between two steps: applies commands (new and aborted requests, added and dropped adapters, and the
outcomes of adapter fetches and grammar preparations), and what an operator does with lanes and requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from engine.core.commit.adapters import add_adapter, drop_adapter, take_answer, use_adapter
from engine.core.commit.admission import fetch_failed, fitted, queue_full, refuse, turn_away
from engine.core.commit.moves import begin_import, cancel_imports, hurry_imports, take_report
from engine.core.commit.sequences import abort, end_mask, finish_early
from engine.core.config import LaneGoals, goal_of
from engine.core.memory.adapters import begin_of
from engine.core.memory.prefix import realm_of
from engine.core.messages.commands import (
    Abort,
    AdapterFetched,
    AddAdapter,
    Command,
    DropAdapter,
    FetchAnswer,
    FetchCancelled,
    FetchFailed,
    FetchKv,
    GrammarFailed,
    GrammarReady,
    MaskFailed,
    MaskReady,
    Submit,
)
from engine.core.messages.grammar import Grammar
from engine.core.messages.moves import EndExport, ExportPages, FetchEnded, PagesCame, PagesSent
from engine.core.messages.requests import ErrorCode, FinishReason, Lane, LaneMode, Refusal, Request, TokenEvent
from engine.core.plan.proposals import proposer_for
from engine.core.state.engine_state import EngineState
from engine.core.state.sequence import PrefixUse, Sequence


def apply_commands(state: EngineState, commands: Iterable[Command]) -> None:
    """Apply commands to the state, in order: submit and abort requests, add and drop adapters, take answers to adapter
    fetches, grammar preparations and masks, and fetch, take and export KV of other engines. Refusals and ends of
    requests are appended to the outbox as events. Raises ValueError for an adapter that no request could ever use."""
    for command in commands:
        match command:
            case Submit(request):
                _submit(state, request)
            case Abort(request_id):
                if request_id in state.sequences:
                    abort(state, state.sequences[request_id])
                else:
                    cancel_imports(state, request_id)
            case FetchKv(request):
                _fetch_ahead(state, request)
            case AddAdapter():
                add_adapter(state, command)
            case DropAdapter(adapter_hash):
                drop_adapter(state, adapter_hash)
            case AdapterFetched() | FetchFailed() | FetchCancelled():
                _answer(state, command)
            case GrammarReady(grammar, num_bytes):
                state.grammars.take_answer(grammar, num_bytes)
            case GrammarFailed(grammar, reason):
                _give_up(state, grammar, reason)
            case MaskReady(request_id, seconds):
                end_mask(state, request_id, seconds)
            case MaskFailed(request_id, seconds, reason):
                if (seq := end_mask(state, request_id, seconds)) is not None:
                    finish_early(state, seq, Refusal(ErrorCode.INVALID_GRAMMAR, reason))
            case PagesCame() | FetchEnded() | ExportPages() | PagesSent() | EndExport():
                take_report(state, command)


def _submit(state: EngineState, request: Request) -> None:
    request = fitted(state, request)
    refusal = refuse(state, request)
    if refusal is not None:
        state.outbox.append(TokenEvent(request.id, finish_reason=FinishReason.ERROR, refusal=refusal))
        return
    seq = _sequence(state, request)
    seq.speculation.proposer = proposer_for(state.config, request, state.learned.answers)
    seq.forecast.output = state.learned.lengths.expect(request)
    seq.forecast.seconds = state.ledger.token_prices.work_of(seq)
    seq.speculation.drafting = state.learned.drafts.begin(request.adapter_hash)
    seq.lane = state.waiting.order.lane(seq)
    # A request that an earlier engine process accepted is not refused now: its client was told that it runs.
    refusal = (None if request.moves else turn_away(state, seq)) or _make_place(state, seq)
    if refusal is not None:
        state.outbox.append(TokenEvent(request.id, finish_reason=FinishReason.ERROR, refusal=refusal))
        return
    seq.forecast.only_batch_delays = _only_batch_delays(state, seq)
    seq.due = request.arrival + goal_of(request.ttft, state.config.goals[request.lane].ttft_s)
    state.sequences[seq.id] = seq
    if request.suspect:
        state.suspects[seq.id] = seq
    ledger = state.ledger
    ledger.accounts.arrive(request, state.waiting.groups(seq.lane))
    seq.account = ledger.accounts.get(request.lane, request.party)
    ledger.token_prices.longest_prompt = max(ledger.token_prices.longest_prompt, len(request.prompt_ids))
    state.waiting.add(seq)
    use_adapter(state, seq, live=1)
    state.grammars.use(request.params.grammar)
    if request.kv_source is None:
        cancel_imports(state, request.id)
    else:
        hurry_imports(state, seq)
        begin_import(state, seq, seq.num_skippable)


def _fetch_ahead(state: EngineState, request: Request) -> None:
    """Begin to fetch the KV of a request from another engine (its `kv_source`) before the request itself is submitted,
    unless the request is known already."""
    if request.id not in state.sequences:
        seq = _sequence(state, request)
        begin_import(state, seq, len(seq.tokens))


def _sequence(state: EngineState, request: Request) -> Sequence:
    """Return a new `Sequence` for a request, without adding it to the state."""
    adapter = state.adapters.get(request.adapter_hash or "")
    begin = (begin_of(adapter.invocation, request.prompt_ids) or 0) if adapter else 0
    prefix = PrefixUse(realm_of(request, share_prefixes=state.config.share_prefixes), begin)
    return Sequence(request, [*request.prompt_ids, *request.produced], prefix=prefix, num_scored=request.num_scored)


def _only_batch_delays(state: EngineState, seq: Sequence) -> bool:
    """Return whether only batch work can delay the new request `seq`, for the metric `yield_seconds`: it is
    interactive, batch requests run, and no other interactive request waits for its first token."""
    if seq.request.lane is not Lane.INTERACTIVE or state.waiting.count(Lane.INTERACTIVE):
        return False
    running = state.running.values()
    begun = all(other.num_generated for other in running if other.request.lane is Lane.INTERACTIVE)
    return begun and any(other.request.lane is Lane.BATCH for other in running)


def _make_place(state: EngineState, seq: Sequence) -> Refusal | None:
    """Make sure that the waiting queue has a place for a new sequence. Returns the refusal if it has none, otherwise
    None. If the queue is full, the last request of a lower lane ends with an error instead. If no lower lane has one,
    the new request is still accepted if its party (see fairness/accounts.py) has no waiting requests in the lane, so
    that no party can block others. A request whose answer has begun, which waits like one that was preempted, is
    accepted in any case."""
    if len(state.waiting) < state.config.max_waiting or seq.request.produced:
        return None
    other, waiting = state.waiting.last(above=seq.lane), state.waiting
    if other is None:
        is_first = waiting.order.group(seq) not in waiting.groups(seq.lane)
        return None if is_first else queue_full(state, seq)
    refusal = queue_full(state, other)
    finish_early(state, other, refusal)
    return None


def _answer(state: EngineState, answer: FetchAnswer) -> None:
    """Apply the executor's answer to an adapter fetch. If the fetch failed and the adapter is not resident, the waiting
    requests for it end with the reason."""
    for seq in take_answer(state, answer):
        refusal = fetch_failed(state.adapters[answer.adapter_hash], state.steps.now)
        finish_early(state, seq, refusal)


def _give_up(state: EngineState, grammar: Grammar, reason: str) -> None:
    """Record that the preparation of a grammar failed, and end the waiting requests that need it with the error
    INVALID_GRAMMAR and the reason."""
    if state.grammars.take_answer(grammar):
        for seq in [seq for seq in state.waiting if seq.request.params.grammar == grammar]:
            finish_early(state, seq, Refusal(ErrorCode.INVALID_GRAMMAR, reason))


def set_mode(state: EngineState, lane: Lane, mode: LaneMode) -> None:
    """Set the mode of a lane in the state, effective from the next plan on."""
    state.waiting.modes[lane] = mode


def set_goals(state: EngineState, lane: Lane, goals: LaneGoals) -> None:
    """Replace the goals of a lane in `state.config`. Due times of tokens already expected do not change."""
    interactive, batch = (goals if each is lane else state.config.goals[each] for each in Lane)
    state.config = replace(state.config, interactive=interactive, batch=batch)


def cancel(state: EngineState, request_ids: Iterable[str]) -> int:
    """End the live requests among `request_ids`, waiting or running, with an error event of code CANCELLED. Returns how
    many were ended: unknown ids are ignored, and duplicate ids count once."""
    found = [state.sequences[request_id] for request_id in dict.fromkeys(request_ids) if request_id in state.sequences]
    for seq in found:
        finish_early(state, seq, Refusal(ErrorCode.CANCELLED, "an administrator cancelled the request"))
    return len(found)
