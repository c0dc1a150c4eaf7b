"""Whether a request is taken: can it ever run, and can it be served before it is of no use?"""

from __future__ import annotations

from bisect import bisect_right
from math import isfinite

from engine.core.adapter_tiers import Held
from engine.core.adapters import Adapter, HostCopy
from engine.core.config import CoreConfig
from engine.core.sequence import Sequence
from engine.core.state import EngineState
from engine.core.types import AdapterId, ErrorCode, Lane, LaneMode, Refusal, Request

SHORTEST_RETRY_S = 1.0
DRAINING_RETRY_S = 10.0
"""Nobody knows when an operator opens a lane again."""
LEAST_WEIGHT = 1e-6


def fitted(state: EngineState, request: Request) -> Request:
    """Cut a maximum that is only a ceiling to what there is room for; `refuse` judges what is left.

    Left are at least min_tokens, and one token behind those that an earlier engine process produced.
    """
    if request.expected_tokens is None:
        return request
    params, most = request.params, _longest(state, request.adapter) - len(request.prompt)
    least = max(params.min_tokens, len(request.produced) + 1)
    max_tokens = min(params.max_tokens, max(least, most))
    expected = min(max_tokens, max(least, request.expected_tokens))
    return request._replace(params=params._replace(max_tokens=max_tokens), expected_tokens=expected)


def _longest(state: EngineState, adapter_id: AdapterId | None) -> int:
    """Tokens of the longest sequence that can run with an adapter, beside the pinned ones."""
    config = state.config
    pages = config.usable_pages - state.tiers.held.pinned_pages - _own_pages(state, adapter_id)
    return min(config.max_model_len, pages * config.block_size)


def _own_pages(state: EngineState, adapter_id: AdapterId | None) -> int:
    """Pages that an adapter needs while a request uses it, if it is not among the pinned ones anyway."""
    adapter = state.adapters.get(adapter_id or "")
    return adapter.num_pages if adapter and not adapter.pinned else 0


def refuse(state: EngineState, request: Request) -> Refusal | None:
    """Why a request can never run; None if it can."""
    config, adapter = state.config, state.adapters.get(request.adapter or "")
    total = len(request.prompt) + request.params.max_tokens
    pages = config.pages_for(total) + state.tiers.held.pinned_pages + _own_pages(state, request.adapter)
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
    return _out_of_reach(state, adapter, request.arrival) if adapter else None


def _out_of_reach(state: EngineState, adapter: Adapter, now: float) -> Refusal | None:
    """Why an adapter that is known cannot be had now."""
    if not adapter.pinned and not _fits_beside(state.config, state.tiers.held, adapter.num_pages, 0):
        reason = f"adapter {adapter.id} needs {adapter.num_pages} pages, and pinned adapters leave it fewer"
        return Refusal(ErrorCode.ADAPTER_UNAVAILABLE, reason)
    if adapter.is_resident or adapter.host is not HostCopy.ABSENT or adapter.retry_at <= now:
        return None
    return fetch_failed(adapter, now)


def _fits_beside(config: CoreConfig, held: Held, adapter_pages: int, kv_pages: int) -> bool:
    """Whether a request can run beside the pinned adapters, with one more unless it needs none."""
    pages, rows = held.pinned_pages + adapter_pages, held.pinned_rows + (adapter_pages > 0)
    fits = rows <= config.max_resident_adapters and pages <= config.adapter_pages
    return fits and pages + kv_pages <= config.usable_pages


def fetch_failed(adapter: Adapter, now: float) -> Refusal:
    """The last fetch of an adapter failed, and the next is not due."""
    reason = f"adapter {adapter.id} cannot be read: {adapter.failure}"
    return Refusal(ErrorCode.ADAPTER_UNAVAILABLE, reason, max(0.0, adapter.retry_at - now))


def misfit(config: CoreConfig, num_pages: int, num_bytes: int) -> str:
    """Why no request could ever use an adapter of this size; empty if it fits."""
    most, room = config.adapter_pages, config.host_adapter_bytes
    if num_pages > most:
        return f"the adapter needs {num_pages} pages, adapters may take {most}: give the engine more memory"
    if num_bytes > room:
        return (
            f"the adapter needs {num_bytes / 2**20:.1f} MiB of host memory, {room / 2**20:.1f} MiB are there for all: "
            "raise engine.host_adapter_gb"
        )
    return ""


def unpinnable(state: EngineState, adapter: Adapter) -> str:
    """Why an adapter cannot be pinned beside the pinned ones and what live requests need; empty if it can.

    A request whose maximum is only a ceiling needs room for the answer that is expected of it.
    """
    config, held = state.config, state.tiers.held
    held = held._replace(pinned_pages=held.pinned_pages + adapter.num_pages, pinned_rows=held.pinned_rows + 1)
    if not _fits_beside(config, held, 0, 0):
        return f"pinned adapters would take {held.pinned_pages} pages, and they may take {config.adapter_pages}"
    for seq in state.sequences.values():
        own = 0 if seq.request.adapter == adapter.id else _own_pages(state, seq.request.adapter)
        most = len(seq.request.prompt) + seq.request.params.max_tokens
        needed = min(most, max(seq.expected_length, seq.num_tokens + 1))
        if not _fits_beside(config, held, own, config.pages_for(needed)):
            return f"pinned adapters would take {held.pinned_pages} pages, too many for request {seq.id}; try later"
    return ""


def _out_of_range(request: Request) -> str:
    """Which figure would upset the books; gateways check theirs, but anybody may speak the protocol."""
    if not LEAST_WEIGHT <= request.weight <= 1 / LEAST_WEIGHT:
        return "weight"
    if request.params.max_tokens < 1:
        return "max_tokens"
    if len(request.produced) >= request.params.max_tokens:
        return "produced"
    figures = {"deadline": request.deadline, "ttft": request.ttft, "itl": request.itl}
    return next((name for name, value in figures.items() if value is not None and not isfinite(value)), "")


def turn_away(state: EngineState, seq: Sequence) -> Refusal | None:
    """Why a request that could run is better refused now than kept waiting in vain; None if it is taken."""
    if state.modes[seq.lane] is LaneMode.DRAINING:
        reason = f"the {seq.lane.name.lower()} lane is being drained and takes no new requests"
        return Refusal(ErrorCode.LANE_QUEUE_FULL, reason, DRAINING_RETRY_S)
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
    outputs = waiting.num_outputs[lane] * ledger.used_share + waiting.num_expected[lane]
    return ledger.price(waiting.num_tokens[lane], outputs)
