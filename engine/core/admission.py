"""Whether a request is taken: can it ever run, and can it be served before it is of no use?"""

from __future__ import annotations

from bisect import bisect_right
from math import isfinite

from engine.core.state import EngineState
from engine.core.types import ErrorCode, Lane, Refusal, Request, Sequence

SHORTEST_RETRY_S = 1.0
LEAST_WEIGHT = 1e-6


def refuse(state: EngineState, request: Request) -> Refusal | None:
    """Why a request can never run; None if it can."""
    config, adapter = state.config, state.adapters.get(request.adapter or "")
    total = len(request.prompt) + request.params.max_tokens
    pages = config.pages_for(total) + (adapter.num_pages if adapter else 0)
    if request.id in state.sequences:
        return Refusal(ErrorCode.INVALID_REQUEST, f"request id {request.id} is already in use")
    if wrong := _out_of_range(request):
        return Refusal(ErrorCode.INVALID_REQUEST, f"{wrong} is out of range")
    if not request.prompt:
        return Refusal(ErrorCode.INVALID_REQUEST, "the prompt is empty")
    if request.adapter and (adapter is None or adapter.closing):
        return Refusal(ErrorCode.MODEL_NOT_FOUND, f"adapter {request.adapter} is not loaded")
    if total > config.max_model_len:
        return Refusal(ErrorCode.CONTEXT_LENGTH_EXCEEDED, f"{total} tokens asked for, at most {config.max_model_len}")
    if pages > config.usable_pages:
        reason = f"{pages} pages needed, the pool has {config.usable_pages}; give the engine more memory"
        return Refusal(ErrorCode.CONTEXT_LENGTH_EXCEEDED, reason)
    return None


def _out_of_range(request: Request) -> str:
    """Which figure would upset the books; gateways check theirs, but anybody may speak the protocol."""
    if not LEAST_WEIGHT <= request.weight <= 1 / LEAST_WEIGHT:
        return "weight"
    if request.params.max_tokens < 1:
        return "max_tokens"
    figures = {"deadline": request.deadline, "ttft": request.ttft, "itl": request.itl}
    return next((name for name, value in figures.items() if value is not None and not isfinite(value)), "")


def turn_away(state: EngineState, seq: Sequence) -> Refusal | None:
    """Why a request that could run is better refused now than kept waiting in vain; None if it is taken."""
    most, deadline = state.config.goals[seq.lane].max_wait_s, seq.request.deadline
    if not most and deadline is None:
        return None
    wait = predicted_wait(state, seq)
    if most and wait > most:
        reason = f"it would wait {wait:.1f} s before it runs, and the lane promises {most:g} s"
        return Refusal(ErrorCode.QUEUE_TIMEOUT, reason, max(SHORTEST_RETRY_S, wait - most))
    if deadline is not None and seq.request.arrival + wait > deadline:
        reason = f"it would wait {wait:.1f} s before it runs, beyond its deadline"
        return Refusal(ErrorCode.QUEUE_TIMEOUT, reason, max(SHORTEST_RETRY_S, wait))
    return None


def queue_full(state: EngineState, seq: Sequence) -> Refusal:
    """The queue is full, and nobody in it may be sent away for `seq`."""
    wait = max(SHORTEST_RETRY_S, predicted_wait(state, seq) / state.config.max_waiting)
    return Refusal(ErrorCode.LANE_QUEUE_FULL, f"{state.config.max_waiting} requests are waiting already", wait)


def predicted_wait(state: EngineState, seq: Sequence) -> float:
    """Seconds until a request that comes now begins to run, from what tokens have cost lately."""
    if seq.lane is not Lane.INTERACTIVE:
        return _batch_wait(state, seq)
    running = [other for other in state.running.values() if other.lane is seq.lane]
    ahead = len(running) + state.waiting.count(seq.lane)
    prompts = state.ledger.price(state.waiting.num_tokens[seq.lane], 0)
    beyond = ahead + 1 - state.config.max_seqs
    if beyond <= 0:
        return prompts
    # They run side by side and end one after the other: `beyond` of them must, in that part of the time all take.
    work = sum(map(state.ledger.work_left, running)) + _waiting_work(state, seq.lane)
    return max(prompts, work * beyond / ahead)


def _batch_wait(state: EngineState, seq: Sequence) -> float:
    """Work ahead of it (all that waits, or what has an earlier deadline), at the rate batch work has been getting."""
    waiting, ledger = state.waiting, state.ledger
    if waiting.count(seq.lane) + len(state.running) < state.config.max_seqs:
        return 0.0
    ahead = 1.0
    if seq.request.deadline is not None:
        place = bisect_right(waiting.urgent, seq.request.deadline, key=lambda other: other.request.deadline or 0.0)
        ahead = place / max(1, len(waiting.urgent))
    return ahead * _waiting_work(state, seq.lane) / max(ledger.batch_share, state.config.scheduling.batch_floor)


def _waiting_work(state: EngineState, lane: Lane) -> float:
    """Device seconds of all that waits in a lane."""
    waiting, ledger = state.waiting, state.ledger
    return ledger.price(waiting.num_tokens[lane], waiting.num_outputs[lane] * ledger.used_share)
