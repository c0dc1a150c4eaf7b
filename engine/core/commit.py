"""The only functions that change the state: commands come in, plans are carried out, results are taken up."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from engine.core.adapters import Adapter, Residency
from engine.core.policy import queue_key
from engine.core.prefix import page_keys
from engine.core.state import EngineState
from engine.core.types import (
    Abort,
    AdapterId,
    AdapterLoad,
    AddAdapter,
    Admission,
    Command,
    DropAdapter,
    ErrorCode,
    FinishReason,
    PageId,
    Refusal,
    Request,
    SampledToken,
    ScheduledChunk,
    Sequence,
    StepPlan,
    StepResult,
    Submit,
    TokenEvent,
)


def apply_commands(state: EngineState, commands: Iterable[Command]) -> None:
    """Takes up what arrived since the last step. Refusals leave through the outbox, as every other news does."""
    for command in commands:
        match command:
            case Submit(request):
                _submit(state, request)
            case Abort(request_id):
                if request_id in state.sequences:
                    _finish(
                        state, state.sequences[request_id], TokenEvent(request_id, finish_reason=FinishReason.ABORT)
                    )
            case AddAdapter(adapter, num_pages):
                _add_adapter(state, adapter, num_pages)
            case DropAdapter(adapter):
                if adapter in state.adapters:
                    state.adapters[adapter].closing = True


def commit(state: EngineState, plan: StepPlan) -> None:
    """Carries a plan out in the books. Cannot fail: the plan was made to fit this very state."""
    for request_id in plan.preempted:
        _preempt(state, state.sequences[request_id])
    for page in plan.dropped_cache:
        state.prefix.drop(page)
        state.pool.reclaim([page])
    for adapter_id in plan.evicted:
        _evict(state, adapter_id)
    for load in plan.loads:
        _begin_load(state, load)
    for admission in plan.admitted:
        _admit(state, admission)
    for chunk in plan.chunks:
        _advance(state, chunk)
    state.released.clear()
    _forget_closed(state)
    state.counters.steps += 1


def absorb(state: EngineState, result: StepResult, now: float) -> list[TokenEvent]:
    """Takes up what a step produced and returns all news since the last call."""
    for adapter_id in result.loaded:
        adapter = state.adapters[adapter_id]
        adapter.residency, adapter.last_used = Residency.RESIDENT, now
    for sample in result.sampled:
        seq = state.sequences.get(sample.request_id)
        if seq is not None:  # aborted while its step ran
            _append(state, seq, sample, now)
    events = list(state.outbox)
    state.outbox.clear()
    return events


def refuse(state: EngineState, request: Request) -> Refusal | None:
    """Why a request can never run, or cannot be taken now; None if it can."""
    config, adapter = state.config, state.adapters.get(request.adapter or "")
    total = len(request.prompt) + request.params.max_tokens
    pages = config.pages_for(total) + (adapter.num_pages if adapter else 0)
    if request.id in state.sequences:
        return Refusal(ErrorCode.INVALID_REQUEST, f"request id {request.id} is already in use")
    if not request.prompt:
        return Refusal(ErrorCode.INVALID_REQUEST, "the prompt is empty")
    if request.adapter and (adapter is None or adapter.closing):
        return Refusal(ErrorCode.MODEL_NOT_FOUND, f"adapter {request.adapter} is not loaded")
    if total > config.max_model_len:
        return Refusal(ErrorCode.CONTEXT_LENGTH_EXCEEDED, f"{total} tokens asked for, at most {config.max_model_len}")
    if pages > config.usable_pages:
        reason = f"{pages} pages needed, the pool has {config.usable_pages}; give the engine more memory"
        return Refusal(ErrorCode.CONTEXT_LENGTH_EXCEEDED, reason)
    if len(state.waiting) >= config.max_waiting:
        return Refusal(ErrorCode.LANE_QUEUE_FULL, f"{config.max_waiting} requests are waiting already")
    return None


def _submit(state: EngineState, request: Request) -> None:
    refusal = refuse(state, request)
    if refusal is not None:
        state.outbox.append(TokenEvent(request.id, finish_reason=FinishReason.ERROR, refusal=refusal))
        return
    seq = Sequence(request, list(request.prompt))
    state.sequences[seq.id] = seq
    insort(state.waiting, seq, key=queue_key)
    if request.adapter:
        state.adapters[request.adapter].live += 1
    state.counters.prompt_tokens += len(request.prompt)


def _add_adapter(state: EngineState, adapter: AdapterId, num_pages: int) -> None:
    """Adding one that is on its way out brings it back."""
    known = state.adapters.setdefault(adapter, Adapter(adapter, num_pages))
    known.closing = False


def _preempt(state: EngineState, seq: Sequence) -> None:
    seq.num_lost = seq.num_computed
    seq.num_preemptions += 1
    _stop_running(state, seq)
    insort(state.waiting, seq, key=queue_key)
    state.counters.preemptions += 1


def _stop_running(state: EngineState, seq: Sequence) -> None:
    """Takes everything a running sequence holds on the device."""
    del state.running[seq.id]
    _release_pages(state, seq.pages)
    seq.pages, seq.num_computed = [], 0
    if seq.request.adapter:
        state.adapters[seq.request.adapter].running -= 1


def _release_pages(state: EngineState, pages: list[PageId]) -> None:
    unreferenced = state.pool.release(pages)
    state.pool.reclaim(state.prefix.park(unreferenced))


def _evict(state: EngineState, adapter_id: AdapterId) -> None:
    adapter = state.adapters[adapter_id]
    state.pool.reclaim(state.pool.release(adapter.pages))
    adapter.pages, adapter.residency = (), Residency.HOST
    state.counters.adapter_evictions += 1


def _begin_load(state: EngineState, load: AdapterLoad) -> None:
    adapter = state.adapters[load.adapter]
    state.pool.acquire(load.pages)
    adapter.pages, adapter.residency = load.pages, Residency.LOADING
    state.counters.adapter_loads += 1


def _admit(state: EngineState, admission: Admission) -> None:
    seq = state.sequences[admission.request_id]
    del state.waiting[bisect_left(state.waiting, queue_key(seq), key=queue_key)]
    state.running[seq.id] = seq
    state.prefix.unpark(list(admission.pages))
    state.pool.acquire(admission.pages)
    seq.pages, seq.num_computed = list(admission.pages), admission.num_computed
    if seq.request.adapter:
        state.adapters[seq.request.adapter].running += 1
    if seq.num_preemptions:
        state.counters.recomputed_tokens += max(0, seq.num_lost - seq.num_computed)
    else:
        seq.num_cached = seq.num_computed
        state.counters.cached_tokens += seq.num_cached
        state.outbox.append(TokenEvent(seq.id, num_cached=seq.num_cached))


def _advance(state: EngineState, chunk: ScheduledChunk) -> None:
    """The chunk counts as computed from here on: whatever a later plan reads is computed after it."""
    seq, size = state.sequences[chunk.request_id], state.config.block_size
    state.pool.acquire(chunk.new_pages)
    seq.pages.extend(chunk.new_pages)
    first = seq.num_computed // size
    seq.num_computed += chunk.num_tokens
    if state.config.prefix_caching:
        keys = page_keys(seq, seq.num_computed // size, size)
        for key, page in zip(keys[first:], seq.pages[first:], strict=False):
            state.prefix.register(key, page)


def _append(state: EngineState, seq: Sequence, sample: SampledToken, now: float) -> None:
    seq.tokens.append(sample.token)
    state.counters.generated_tokens += 1
    if seq.request.adapter:
        state.adapters[seq.request.adapter].last_used = now
    logprobs = (sample.logprobs,) if sample.logprobs else ()
    reason = finish_reason(seq, state.config.eos_token_ids, state.config.max_model_len)
    event = TokenEvent(seq.id, (sample.token,), logprobs, reason, seq.num_cached)
    if reason is None:
        state.outbox.append(event)
    else:
        _finish(state, seq, event)


def finish_reason(seq: Sequence, eos_token_ids: tuple[int, ...], max_model_len: int) -> FinishReason | None:
    """Whether the newest token ends the sequence."""
    params, token = seq.request.params, seq.tokens[-1]
    stops = token in params.stop_token_ids or (token in eos_token_ids and not params.ignore_eos)
    if stops and seq.num_generated >= params.min_tokens:
        return FinishReason.STOP
    if seq.num_generated >= params.max_tokens or len(seq.tokens) >= max_model_len:
        return FinishReason.LENGTH
    return None


def _finish(state: EngineState, seq: Sequence, event: TokenEvent) -> None:
    """The one way out: frees everything, tells the executor with the next plan and the client with the next events."""
    if seq.id in state.running:
        _stop_running(state, seq)
        state.released.append(seq.id)
    else:
        del state.waiting[bisect_left(state.waiting, queue_key(seq), key=queue_key)]
    del state.sequences[seq.id]
    if seq.request.adapter:
        state.adapters[seq.request.adapter].live -= 1
    state.outbox.append(event)


def _forget_closed(state: EngineState) -> None:
    for adapter in [a for a in state.adapters.values() if a.closing]:
        if adapter.live == 0 and adapter.residency is Residency.HOST:
            del state.adapters[adapter.id]
