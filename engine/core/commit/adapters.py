"""Changes to the adapters in the engine state, by commands, plans, fetch answers, and sequences that start or end."""

from __future__ import annotations

from engine.core.commit.admission import fitted, misfit, unpinnable
from engine.core.memory.adapters import Adapter, HostCopy
from engine.core.messages.commands import AdapterFetched, AddAdapter, FetchAnswer, FetchCancelled, FetchFailed
from engine.core.messages.requests import AdapterHash
from engine.core.messages.step import AdapterLoad, StepPlan
from engine.core.state.engine_state import EngineState
from engine.core.state.sequence import Sequence

LONGEST_BACKOFF = 64
"""Maximum backoff after failed fetches, as a multiple of the first one: about a minute."""


def add_adapter(state: EngineState, command: AddAdapter) -> bool:
    """Register an adapter, or restore a dropped one that is still known; the command's path replaces its path, and its
    failed fetches are forgotten. Returns whether this call reserved host memory for an adapter that, by the command,
    has just been read. Raises ValueError, with the reason, if no request could ever use the adapter."""
    if reason := misfit(state.config, command.num_pages, command.num_bytes):
        raise ValueError(reason)
    adapter = state.adapters.get(command.adapter_hash)
    if adapter is None:
        sizes = command.num_pages, command.rank, command.num_bytes
        adapter = Adapter(command.adapter_hash, *sizes, command.path, command.invocation)
        state.adapters[adapter.adapter_hash] = adapter
    adapter.path = command.path
    adapter.closing = False
    adapter.fetched.failures, adapter.fetched.retry_at = 0, 0.0
    takes = command.is_read and adapter.host is HostCopy.ABSENT and command.num_bytes <= state.host_bytes_free
    if takes:
        adapter.host = HostCopy.FETCHING
    state.adapters.file(adapter)
    return takes


def drop_adapter(state: EngineState, adapter_hash: AdapterHash) -> None:
    """Unpin an adapter and refuse new requests for it; live ones continue. An unknown adapter is ignored."""
    adapter = state.adapters.get(adapter_hash)
    if adapter is not None:
        adapter.closing, adapter.pinned = True, False
        state.adapters.file(adapter)


def pin_adapter(state: EngineState, adapter_hash: AdapterHash, pinned: bool) -> None:
    """Pin or unpin an adapter. A pinned adapter is not evicted once it is resident. Pinning cuts the `max_tokens` of
    live requests that are only ceilings to the remaining room. Raises ValueError, with the reason, if the adapter is
    unknown, was dropped, or would leave too little room if pinned."""
    adapter = state.adapters.get(adapter_hash)
    if adapter is None or adapter.closing:
        raise ValueError(f"adapter {adapter_hash} is not loaded")
    if pinned and not adapter.pinned and (reason := unpinnable(state, adapter)):
        raise ValueError(reason)
    adapter.pinned = pinned
    state.adapters.file(adapter)
    if pinned:
        for seq in state.sequences.values():
            seq.request = fitted(state, seq.request)


def use_adapter(state: EngineState, seq: Sequence, *, live: int = 0, running: int = 0) -> None:
    """Add `live` and `running`, which may be negative, to the numbers of live and running sequences of the adapter of
    `seq`, if it has one."""
    if seq.request.adapter_hash:
        adapter = state.adapters[seq.request.adapter_hash]
        adapter.live += live
        adapter.running += running
        state.adapters.file(adapter)


def start_adapter(state: EngineState, seq: Sequence, plan: StepPlan) -> None:
    """Count a sequence that starts to run by `plan` as a running one of its adapter, if it has one. Only the sequence's
    first start counts for popularity and, if the plan does not load the adapter for it, as a hit (a start that needed
    no copy to the device)."""
    if not seq.request.adapter_hash:
        return
    adapter = state.adapters[seq.request.adapter_hash]
    adapter.running += 1
    if seq.preempted.times == 0:
        adapter.start(plan.now, state.config.adapter_half_life_s)
        adapter.loaded.hits += not any(load.request_id == seq.id for load in plan.adapters.loads)
    state.adapters.file(adapter)


def adapter_wait(state: EngineState, seq: Sequence) -> float:
    """Return the seconds from a sequence's arrival until its adapter was in host memory; 0 if it was there before, or
    if the sequence has no adapter."""
    if not seq.request.adapter_hash:
        return 0.0
    return max(0.0, state.adapters[seq.request.adapter_hash].fetched.at - seq.request.arrival)


def move_adapters(state: EngineState, plan: StepPlan) -> None:
    """Apply a plan's evictions, loads, freed host copies, fetches and cancelled fetches of adapters to the state and
    its counters."""
    for adapter_hash in plan.adapters.evicted:
        _evict(state, state.adapters[adapter_hash])
    for load in plan.adapters.loads:
        _load(state, load)
    for adapter_hash in plan.adapters.dropped:
        _set_host(state, state.adapters[adapter_hash], HostCopy.ABSENT)
        state.counters.adapters.host_evictions += 1
    for fetch in plan.adapters.fetches:
        state.adapters.fetching[fetch.adapter_hash] = None
        _set_host(state, state.adapters[fetch.adapter_hash], HostCopy.FETCHING)
    for adapter_hash in plan.adapters.cancelled:
        _set_host(state, state.adapters[adapter_hash], HostCopy.CANCELLED)


def note_loads(state: EngineState, loads: tuple[AdapterLoad, ...], seconds: tuple[float, ...]) -> None:
    """Record the seconds that the copy of each adapter in `loads` took, in the adapter and in the counters."""
    for load, taken in zip(loads, seconds, strict=True):
        adapter = state.adapters[load.adapter_hash]
        adapter.loaded.seconds = taken
        state.counters.adapters.load_seconds += taken
        state.adapters.file(adapter)


def take_answer(state: EngineState, answer: FetchAnswer) -> list[Sequence]:
    """Apply the executor's answer to an adapter fetch to the adapter and the counters, and return the waiting sequences
    that need the adapter if the fetch failed and it is not resident; otherwise none. An answer without a fetch under
    way is ignored."""
    adapter = state.adapters.get(answer.adapter_hash)
    if adapter is None or adapter.host not in (HostCopy.FETCHING, HostCopy.CANCELLED):
        return []
    state.adapters.fetching.pop(adapter.adapter_hash, None)
    waiting: list[Sequence] = []
    match answer:
        case AdapterFetched(_, seconds):
            _note_fetch(state, adapter, seconds)
        case FetchFailed(_, reason):
            _note_failure(state, adapter, reason)
            if not adapter.is_resident:
                waiting = [seq for seq in state.waiting if seq.request.adapter_hash == adapter.adapter_hash]
        case FetchCancelled():
            adapter.host = HostCopy.ABSENT
    state.adapters.file(adapter)
    return waiting


def forget_closed(state: EngineState) -> None:
    """Forget the dropped adapters that have no live requests and are neither resident nor in host memory."""
    for adapter_hash in list(state.adapters.closing):
        adapter = state.adapters[adapter_hash]
        if not (adapter.live or adapter.is_resident) and adapter.host is HostCopy.ABSENT:
            state.adapters.forget(adapter)


def _note_fetch(state: EngineState, adapter: Adapter, seconds: float) -> None:
    adapter.host = HostCopy.PRESENT
    fetched = adapter.fetched
    fetched.count += 1
    fetched.seconds, fetched.at, fetched.failures = seconds, state.steps.now, 0
    state.counters.adapters.fetches += 1
    state.counters.adapters.fetch_seconds += seconds


def _note_failure(state: EngineState, adapter: Adapter, reason: str) -> None:
    fetched = adapter.fetched
    adapter.host, fetched.failure = HostCopy.ABSENT, reason
    fetched.retry_at = state.steps.now + state.config.fetch_backoff_s * min(2**fetched.failures, LONGEST_BACKOFF)
    fetched.failures += 1
    state.counters.adapters.fetch_failures += 1


def _set_host(state: EngineState, adapter: Adapter, host: HostCopy) -> None:
    adapter.host = host
    state.adapters.file(adapter)


def _evict(state: EngineState, adapter: Adapter) -> None:
    state.pool.reclaim(state.pool.release(adapter.pages))
    adapter.pages = ()
    state.counters.adapters.evictions += 1
    state.adapters.file(adapter)


def _load(state: EngineState, load: AdapterLoad) -> None:
    adapter = state.adapters[load.adapter_hash]
    state.pool.acquire(load.pages)
    adapter.pages, adapter.loaded.num_starts = load.pages, 0
    adapter.loaded.count += 1
    state.counters.adapters.loads += 1
    state.adapters.file(adapter)
