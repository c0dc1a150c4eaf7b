"""Changes to a sequence and to all that it holds in the engine state: its start, its preemption, its end, the pages
that it shares, and the masks that it waits for (see state/grammars.py)."""

from __future__ import annotations

from engine.core.commit.adapters import adapter_wait, start_adapter, use_adapter
from engine.core.commit.moves import cancel_imports
from engine.core.messages.requests import AdapterHash, FinishReason, PageId, Refusal, TokenEvent
from engine.core.messages.step import Admission, StepResult
from engine.core.state.engine_state import EngineState
from engine.core.state.ledger import StepUnderWay
from engine.core.state.sequence import Sequence, page_keys, tail_key


def abort_users(state: EngineState, adapter_hash: AdapterHash) -> int:
    """Abort all live requests of a dropped adapter, each with an ABORT event, and return their number; 0 if the adapter
    was not dropped."""
    if adapter_hash not in state.adapters.closing:
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


def finish(state: EngineState, seq: Sequence, event: TokenEvent) -> None:
    """End a live request: free all that it holds, forget its sequence, and append `event` to the outbox for the client.
    Every end of a request passes through this function. If the sequence was running, the next plan tells the executor
    to release it."""
    if seq.id in state.running:
        _stop_running(state, seq)
        state.steps.released.append(seq.id)
    else:
        _stop_waiting(state, seq)
    cancel_imports(state, seq.id)
    state.host.end_need(seq.prefix.keys[: seq.prefix.num_saved])
    if seq.num_generated > len(seq.request.produced):
        state.learned.lengths.learn(seq.request, seq.num_generated)
    if seq.speculation.proposer is not None:
        seq.speculation.proposer.end(seq.tokens)
        state.learned.drafts.end(seq.request.adapter_hash, seq.speculation.drafting)
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


def preempt(state: EngineState, seq: Sequence) -> None:
    seq.preempted.num_lost = seq.num_computed
    seq.preempted.num_paid = max(seq.preempted.num_paid, seq.num_computed)
    seq.preempted.times += 1
    _stop_running(state, seq)
    state.waiting.add(seq)


def admit(state: EngineState, admission: Admission) -> None:
    seq = state.sequences[admission.request_id]
    _stop_waiting(state, seq)
    state.running[seq.id] = seq
    state.prefix.unpark(list(admission.pages), seq.lane)
    state.pool.acquire(admission.pages)
    seq.pages, seq.num_computed = list(admission.pages), admission.num_computed
    register(state, seq, 0)
    offer_tail(state, seq, 0)
    if state.config.prefix_caching:
        state.prefix.promise(seq.prefix.keys, seq.id)
    start_adapter(state, seq, state.steps.in_flight)
    if seq.preempted.times:
        state.counters.recomputed_tokens += max(0, seq.preempted.num_lost - seq.num_computed)
    else:
        seq.prefix.num_cached = seq.num_computed
        state.counters.cached_tokens += seq.prefix.num_cached
        state.counters.prompt_tokens += min(seq.prefix.num_cached, len(seq.request.prompt_ids))
        waits = (max(0.0, state.steps.now - seq.request.arrival), adapter_wait(state, seq))
        is_loaded = any(load.request_id == seq.id for load in state.steps.in_flight.adapters.loads)
        seq.forecast.only_batch_delays = seq.forecast.only_batch_delays and not (waits[1] or is_loaded)
        state.outbox.append(TokenEvent(seq.id, num_cached=seq.prefix.num_cached, wait=waits[0], adapter_wait=waits[1]))


def _stop_running(state: EngineState, seq: Sequence) -> None:
    """Free the pages and the adapter of a running sequence, and remove it from the running ones. Pages in the prefix
    cache become idle unless other sequences use them."""
    del state.running[seq.id]
    state.grammars.masks.leave(seq)
    state.prefix.break_promises(seq.prefix.keys, seq.id)
    _withdraw_tail(state, seq)
    release_pages(state, seq.pages)
    release_pages(state, seq.speculation.drafting.clear())
    seq.pages, seq.num_computed = [], 0
    use_adapter(state, seq, running=-1)


def _stop_waiting(state: EngineState, seq: Sequence) -> None:
    state.waiting.remove(seq)
    waiting = state.waiting.groups(seq.lane)
    if seq.request.party not in waiting:
        state.ledger.accounts.leave(seq.request.lane, seq.request.party, waiting)


def release_pages(state: EngineState, pages: list[PageId]) -> None:
    unreferenced = state.pool.release(pages)
    state.pool.reclaim(state.prefix.park(unreferenced, state.steps.now))


def register(state: EngineState, seq: Sequence, before: int) -> None:
    """Add to the prefix cache the pages of a sequence that have become full since `before` tokens were computed. A page
    is full when all of its tokens are known and computed, or planned to be. Without prefix caching, none is added."""
    size = state.config.block_size
    first, last = before // size, min(seq.num_computed, len(seq.tokens)) // size
    if first == last or not state.config.prefix_caching:
        return
    keys = page_keys(seq, last, size)
    for key, page in zip(keys[first:], seq.pages[first:], strict=False):
        state.prefix.register(key, page, seq.lane)


def offer_tail(state: EngineState, seq: Sequence, before: int) -> None:
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


def await_masks(state: EngineState, step: StepUnderWay, result: StepResult) -> None:
    """Take back the tokens that a step did not sample because their masks were not there, and let the sequences whose
    next mask takes too long for a step wait for it. Called once the step's other tokens have been appended."""
    for request_id in result.unsampled:
        seq = step.sequences[request_id]
        if state.is_live(seq):
            _take_back(state, seq)
    for request_id in result.masking:
        seq = step.sequences[request_id]
        if state.running.get(seq.id) is seq:
            state.grammars.masks.wait(seq)


def _take_back(state: EngineState, seq: Sequence) -> None:
    """Count a sequence's newest token as not computed, because the step that computed it sampled none after it. A later
    step computes it once more, which overwrites its KV with the same."""
    seq.masks_slowly = True
    if seq.id in state.running:
        seq.num_pending -= 1
        seq.num_computed -= 1
        return
    state.waiting.remove(seq)  # it was preempted since, and the queue counts its tokens
    seq.num_pending -= 1
    state.waiting.add(seq)


def end_mask(state: EngineState, request_id: str, seconds: float) -> Sequence | None:
    """Record that the executor has answered for a mask, which took `seconds` of a core's time, and charge them to the
    tenant as device time. Return the sequence if it still lives, otherwise None."""
    seq = state.grammars.masks.end(request_id, seconds, state.steps.now)
    if seq is None:
        return None
    seq.account.charge(seconds, seconds)
    seq.device_seconds += seconds
    return seq if state.is_live(seq) else None
