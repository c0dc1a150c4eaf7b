"""Admission control: refuses requests that can never run, or that would be served too late to be of use."""

from __future__ import annotations

from bisect import bisect_right
from math import isfinite

from engine.core.config import CoreConfig
from engine.core.memory.adapter_eviction import Held
from engine.core.memory.adapters import Adapter, HostCopy, begin_of
from engine.core.messages.prompt_logprobs import MOST_ALTERNATIVES
from engine.core.messages.requests import AdapterHash, ErrorCode, Lane, LaneMode, Refusal, Request
from engine.core.state.engine_state import EngineState
from engine.core.state.sequence import Sequence

SHORTEST_RETRY_S = 1.0
DRAINING_RETRY_S = 10.0
"""Retry-After of a draining lane, in seconds: arbitrary, since the engine cannot know when an operator reopens the
lane."""
LEAST_WEIGHT = 1e-6


def fitted(state: EngineState, request: Request) -> Request:
    """Return the request with `max_tokens` cut so that prompt and answer fit into the context length and the pages that
    pinned adapters leave, if it is only a ceiling (`expected_tokens` is set); otherwise the request itself. It is not
    cut below `min_tokens`, nor below one token more than an earlier engine process produced. `refuse` decides
    afterwards whether the cut request can run."""
    if request.expected_tokens is None:
        return request
    params, most = request.params, _longest(state, request.adapter_hash) - len(request.prompt_ids)
    least = max(params.min_tokens, len(request.produced) + 1)
    max_tokens = min(params.max_tokens, max(least, most))
    return request._replace(params=params._replace(max_tokens=max_tokens))


def _longest(state: EngineState, adapter_hash: AdapterHash | None) -> int:
    """Return the length in tokens of the longest sequence that can run with an adapter (None: the base model): at most
    `max_model_len`, given the pages that pinned adapters take."""
    config = state.config
    pages = config.usable_pages - state.adapters.held.pinned_pages - _own_pages(state, adapter_hash)
    return min(config.max_model_len, pages * config.block_size)


def _own_pages(state: EngineState, adapter_hash: AdapterHash | None) -> int:
    """Return the pages that an adapter needs while a request uses it. It is 0 for no adapter, an unknown one, and a
    pinned one, whose pages `Held.pinned_pages` counts."""
    adapter = state.adapters.get(adapter_hash or "")
    return adapter.num_pages if adapter and not adapter.pinned else 0


def refuse(state: EngineState, request: Request) -> Refusal | None:
    """Return why a new request is invalid (id in use, field out of range, empty prompt, unknown or dropped adapter, no
    invocation of its adapter), can never run (too many tokens, or too few pages beside pinned adapters), or cannot get
    its adapter now. None means that it can run. The predicted wait and the queue are not considered."""
    config, adapter = state.config, state.adapters.get(request.adapter_hash or "")
    total = len(request.prompt_ids) + request.params.max_tokens
    pages = config.pages_for(total) + state.adapters.held.pinned_pages + _own_pages(state, request.adapter_hash)
    if request.id in state.sequences:
        return Refusal(ErrorCode.INVALID_REQUEST, f"request id {request.id} is already in use")
    if wrong := _out_of_range(request):
        return Refusal(ErrorCode.INVALID_REQUEST, f"{wrong} is out of range")
    if config.pools_only and request.pooling is None:
        return Refusal(ErrorCode.INVALID_REQUEST, "the model has no head: it gives embeddings, and generates no tokens")
    if foreign := _foreign_ids(config.vocab_size, request):
        reason = (
            f"{foreign} has token ids that the model has no rows for: they must be from 0 to {config.vocab_size - 1}"
        )
        return Refusal(ErrorCode.INVALID_REQUEST, reason)
    if not request.prompt_ids:
        return Refusal(ErrorCode.INVALID_REQUEST, "the prompt is empty")
    if request.adapter_hash and (adapter is None or adapter.closing):
        return Refusal(ErrorCode.MODEL_NOT_FOUND, f"adapter {request.adapter_hash} is not loaded")
    if total > config.max_model_len:
        return Refusal(ErrorCode.CONTEXT_LENGTH_EXCEEDED, f"{total} tokens asked for, at most {config.max_model_len}")
    if pages > config.usable_pages:
        reason = f"{pages} pages needed, the pool has {config.usable_pages}; give the engine more memory"
        return Refusal(ErrorCode.CONTEXT_LENGTH_EXCEEDED, reason)
    if adapter and begin_of(adapter.invocation, request.prompt_ids) is None:
        reason = f"the adapter applies from its invocation tokens {list(adapter.invocation)} on; the prompt lacks them"
        return Refusal(ErrorCode.INVALID_REQUEST, reason)
    return _out_of_reach(state, adapter, request.arrival) if adapter else None


def _out_of_reach(state: EngineState, adapter: Adapter, now: float) -> Refusal | None:
    """Return why a known adapter cannot be used at `now`: pinned adapters leave too few pages or slots, or it is
    neither in memory nor being fetched, its last fetch failed and the next attempt is not due yet. None means that it
    can be used."""
    if not adapter.pinned and not _fits_beside(state.config, state.adapters.held, adapter.num_pages, 0):
        reason = f"adapter {adapter.adapter_hash} needs {adapter.num_pages} pages, and pinned adapters leave it fewer"
        return Refusal(ErrorCode.ADAPTER_UNAVAILABLE, reason)
    if adapter.is_resident or adapter.host is not HostCopy.ABSENT or adapter.fetched.retry_at <= now:
        return None
    return fetch_failed(adapter, now)


def _fits_beside(config: CoreConfig, held: Held, adapter_pages: int, kv_pages: int) -> bool:
    """Return whether a request can run beside the pinned adapters. `adapter_pages` is the size in pages of its own
    adapter, or 0 if it has none or a pinned one; `kv_pages` is that of its KV."""
    pages, adapter_slots = held.pinned_pages + adapter_pages, held.pinned_adapter_slots + (adapter_pages > 0)
    fits = adapter_slots <= config.max_resident_adapters and pages <= config.adapter_pages
    return fits and pages + kv_pages <= config.usable_pages


def fetch_failed(adapter: Adapter, now: float) -> Refusal:
    """Return the refusal for an adapter whose last fetch failed, with, as `retry_after`, the seconds from `now` until
    the next attempt. The reason, which may hold paths, is in the adapter's statistics, for operators."""
    reason = f"adapter {adapter.adapter_hash} cannot be read; its operator sees why"
    return Refusal(ErrorCode.ADAPTER_UNAVAILABLE, reason, max(0.0, adapter.fetched.retry_at - now))


def misfit(config: CoreConfig, num_pages: int, num_bytes: int) -> str:
    """Return why no request could ever use an adapter of this size in pages and bytes; empty if it fits."""
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
    """Return why an adapter cannot be pinned, in words; an empty string means that it can. The adapter must fit beside
    the adapters that are pinned already and beside each live request. A request whose `max_tokens` is only a ceiling
    needs room for its expected answer."""
    config, held = state.config, state.adapters.held
    pages, adapter_slots = held.pinned_pages + adapter.num_pages, held.pinned_adapter_slots + 1
    held = held._replace(pinned_pages=pages, pinned_adapter_slots=adapter_slots)
    if not _fits_beside(config, held, 0, 0):
        return f"pinned adapters would take {held.pinned_pages} pages, and they may take {config.adapter_pages}"
    for seq in state.sequences.values():
        own = 0 if seq.request.adapter_hash == adapter.adapter_hash else _own_pages(state, seq.request.adapter_hash)
        most = len(seq.request.prompt_ids) + seq.request.params.max_tokens
        expected = most if seq.request.expected_tokens is None else seq.expected_length
        needed = min(most, max(expected, seq.num_tokens + 1))
        if not _fits_beside(config, held, own, config.pages_for(needed)):
            return f"pinned adapters would take {held.pinned_pages} pages, too many for request {seq.id}; try later"
    return ""


def _out_of_range(request: Request) -> str:
    """Return which field (`weight`, `class_weight`, `max_tokens`, `prompt_logprobs`, `produced`, `num_scored`,
    `deadline`, `ttft`, `itl` or `kv_source`) has a value that would corrupt the accounting; an empty string means that
    none has. A gateway checks these fields too, but other clients may use the engine's protocol."""
    for name, weight in (("weight", request.weight), ("class_weight", request.class_weight)):
        if not LEAST_WEIGHT <= weight <= 1 / LEAST_WEIGHT:
            return name
    pools, width, max_tokens = request.pooling is not None, request.params.prompt_logprobs, request.params.max_tokens
    least = 1 if width is None and not pools else 0
    if max_tokens < least or (pools and max_tokens > 0):
        return "max_tokens"
    if width is not None and (pools or not 0 <= width <= MOST_ALTERNATIVES):
        return "prompt_logprobs"
    if request.produced and len(request.produced) >= request.params.max_tokens:
        return "produced"
    if not 0 <= request.num_scored <= max(0, len(request.prompt_ids) - 1):
        return "num_scored"
    waits = request.kv_source.seconds if request.kv_source else None
    figures = {"deadline": request.deadline, "ttft": request.ttft, "itl": request.itl, "kv_source": waits}
    return next((name for name, value in figures.items() if value is not None and not isfinite(value)), "")


def _foreign_ids(vocab_size: int, request: Request) -> str:
    """Return which field has token ids outside the vocabulary; an empty string means that none has. They come from
    callers, and from tokenizers that know more tokens than the model has rows."""
    params = request.params
    fields = {
        "the prompt": request.prompt_ids,
        "produced": request.produced,
        "prediction": request.prediction,
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": [token_id for token_id, _ in params.logit_bias],
    }
    beyond = (name for name, ids in fields.items() if ids and not (min(ids) >= 0 and max(ids) < vocab_size))
    return next(beyond, "") if vocab_size else ""


def turn_away(state: EngineState, seq: Sequence) -> Refusal | None:
    """Return why a new request that could run is refused rather than queued, with a Retry-After. None means that it is
    accepted. The request is refused if its lane is draining, or if its predicted wait exceeds the lane's `max_wait_s`
    (0: no limit) or ends after its deadline."""
    if state.waiting.modes[seq.lane] is LaneMode.DRAINING:
        reason = f"the {seq.lane.name.lower()} lane is being drained and takes no new requests"
        return Refusal(ErrorCode.LANE_QUEUE_FULL, reason, DRAINING_RETRY_S)
    most, deadline = state.config.goals[seq.lane].max_wait_s, seq.request.deadline
    if not most and deadline is None:
        return None
    wait = predicted_wait(state, seq.lane, deadline)
    if most and wait > most:
        reason = f"it would wait {wait:.1f} s before it runs, and the lane promises {most:g} s"
        return Refusal(ErrorCode.QUEUE_TIMEOUT, reason, max(SHORTEST_RETRY_S, wait - most))
    if deadline is not None and seq.request.arrival + wait > deadline:
        reason = f"it would wait {wait:.1f} s before it runs, beyond its deadline"
        return Refusal(ErrorCode.QUEUE_TIMEOUT, reason, max(SHORTEST_RETRY_S, wait))
    return None


def queue_full(state: EngineState, seq: Sequence) -> Refusal:
    """Return the refusal for a sequence that finds no place in a full queue, or that loses its place to another one.
    Its Retry-After is the predicted wait divided by `max_waiting`: the seconds until a place is free, at least 1."""
    wait = max(SHORTEST_RETRY_S, predicted_wait(state, seq.lane, seq.request.deadline) / state.config.max_waiting)
    return Refusal(ErrorCode.LANE_QUEUE_FULL, f"{state.config.max_waiting} requests are waiting already", wait)


def predicted_wait(state: EngineState, lane: Lane, deadline: float | None = None) -> float:
    """Return the predicted seconds until a request that arrives now in a lane starts to run: the work ahead of it, at
    the recent cost of tokens.

    Args:
        deadline: the request's deadline, in seconds on the engine's clock, by which batch work is ordered.
    """
    if lane is not Lane.INTERACTIVE:
        return _batch_wait(state, lane, deadline)
    running = [seq for seq in state.running.values() if seq.lane is lane]
    ahead = len(running) + state.waiting.count(lane)
    prompts = state.ledger.token_prices.of(state.waiting.num_tokens[lane], 0)
    beyond = ahead + 1 - state.config.max_seqs
    if beyond <= 0:
        return prompts
    # The `ahead` sequences run concurrently and end one by one; `beyond` of them must end first, which is assumed to
    # take that fraction of the time for all of them.
    work = sum(map(state.ledger.token_prices.work_left, running)) + _waiting_work(state, lane)
    return max(prompts, work * beyond / ahead)


def _batch_wait(state: EngineState, lane: Lane, deadline: float | None) -> float:
    """Return the predicted seconds until a batch request starts to run: 0 if slots are free for it and all that wait,
    otherwise the work ahead of it divided by the share of device time that batch work has been getting, at least
    `batch_floor`. The work ahead is all waiting work or, for a request with a deadline, the same fraction of it as the
    fraction of waiting deadlines that are not later."""
    waiting, ledger = state.waiting, state.ledger
    if waiting.count(lane) + len(state.running) < state.config.max_seqs:
        return 0.0
    ahead = 1.0
    if deadline is not None:
        place = bisect_right(waiting.urgent, deadline, key=lambda seq: seq.request.deadline or 0.0)
        ahead = place / max(1, len(waiting.urgent))
    return ahead * _waiting_work(state, lane) / max(ledger.batch.share, state.config.scheduling.batch_floor)


def _waiting_work(state: EngineState, lane: Lane) -> float:
    """Return the device seconds that all waiting requests of a lane will cost."""
    waiting = state.waiting
    return state.ledger.token_prices.of(waiting.num_tokens[lane], waiting.num_outputs[lane])
