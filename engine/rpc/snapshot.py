"""Makes a snapshot of the engine for operators: EngineStats from an EngineState that no step changes meanwhile, in at
most one pass over requests, tenants or adapters; only the integrity check looks at every page."""

from __future__ import annotations

from collections import Counter
from itertools import chain, islice
from typing import Any

from engine.core.memory.adapters import Adapter, HostCopy
from engine.core.state.engine_state import Buckets, EngineState
from engine.core.state.sequence import Sequence
from engine.core.watch.check import leftovers, violations
from engine.core.watch.report import LaneReport, TenantReport, lane_reports, tenant_reports
from engine.pb import engine_pb2 as pb
from engine.rpc.wire import LANE_MODES, LANES, origin_to_pb

HOST_STATES = {
    HostCopy.ABSENT: "disk",
    HostCopy.FETCHING: "fetching",
    HostCopy.CANCELLED: "fetching",
    HostCopy.PRESENT: "host",
}

Figures = dict[str, Any]
"""Names and values of fields of EngineStats."""


def snapshot(state: EngineState, step_seconds: float, now: float, *, check: bool = False) -> pb.EngineStats:
    """Return the engine's statistics.

    Args:
        step_seconds: total duration of all steps so far.
        now: current time in seconds on the engine's clock.
        check: also run the integrity check, which takes time proportional to the page pool, for `violations`.
    """
    return pb.EngineStats(
        lanes=map(_lane, lane_reports(state, now)),
        tenants=map(_tenant, tenant_reports(state)),
        adapters=[_adapter(adapter, now) for adapter in state.adapters.values()],
        **_pages(state),
        **_counters(state),
        **_adapter_memory(state),
        **_preemptions(state),
        **_step_model(state),
        **_batch(state),
        **_kv_moves(state),
        step_seconds=step_seconds,
        violations=_problems(state) if check else [],
    )


def _problems(state: EngineState) -> list[str]:
    return violations(state) + ([] if state.sequences else leftovers(state))


def _lane(report: LaneReport) -> pb.LaneStats:
    return pb.LaneStats(
        lane=LANES[report.lane],
        running=report.running,
        waiting=report.waiting,
        oldest_wait_seconds=report.oldest_wait_s,
        slo_ttft_attainment=report.ttft_attainment,
        slo_itl_attainment=report.itl_attainment,
        device_seconds=report.device_seconds,
        vtc_gap_seconds=report.gap,
        vtc_bound_seconds=report.bound,
        mode=LANE_MODES[report.mode],
        preemptions=report.preemptions,
    )


def _tenant(report: TenantReport) -> pb.TenantStats:
    return pb.TenantStats(
        lane=LANES[report.lane],
        tenant=report.tenant,
        running=report.running,
        waiting=report.waiting,
        device_seconds=report.device_seconds,
        served_seconds=report.served,
    )


def _adapter(adapter: Adapter, now: float) -> pb.AdapterStats:
    return pb.AdapterStats(
        adapter=adapter.adapter_hash,
        state="resident" if adapter.is_resident else HOST_STATES[adapter.host],
        pages=len(adapter.pages),
        running=adapter.running,
        waiting=adapter.live - adapter.running,
        rank=adapter.rank,
        bytes=adapter.num_bytes,
        hits=adapter.hits,
        loads=adapter.loads,
        fetches=adapter.fetches,
        last_load_seconds=adapter.load_seconds,
        last_fetch_seconds=adapter.fetch_seconds,
        idle_seconds=None if adapter.last_used is None else max(0.0, now - adapter.last_used),
        pinned=adapter.pinned,
        error=adapter.failure if adapter.failures else "",
    )


def _adapter_memory(state: EngineState) -> Figures:
    counters = state.counters
    names = ("fetches", "fetch_failures", "fetch_seconds", "load_seconds", "host_evictions")
    return {
        "adapter_host_total_bytes": state.config.host_adapter_bytes,
        "adapter_host_used_bytes": state.tiers.held.host_bytes,
        "max_resident_adapters": state.config.max_resident_adapters,
        **{f"adapter_{name}": getattr(counters, f"adapter_{name}") for name in names},
    }


def _pages(state: EngineState) -> Figures:
    adapter_pages = state.adapter_pages
    free, cached = len(state.pool.free), state.prefix.num_idle
    return {
        "total_pages": state.config.usable_pages,
        "free_pages": free,
        "kv_pages": state.config.usable_pages - free - cached - adapter_pages,
        "cached_pages": cached,
        "adapter_pages": adapter_pages,
        "host_total_pages": state.host.num_pages,
        "host_used_pages": state.host.num_pages - len(state.host.free) - len(state.host.idle),
    }


def _counters(state: EngineState) -> Figures:
    names = (
        "steps",
        "late_steps",
        "host_bound_steps",
        "recomputed_tokens",
        "prompt_tokens",
        "cached_tokens",
        "generated_tokens",
        "proposed_tokens",
        "accepted_tokens",
        "adapter_loads",
    )
    moves = ("adapter_evictions", "pages_saved", "pages_restored")
    spreads = ("step_sequences", "step_tokens", "yield_seconds")
    counts = {name: getattr(state.counters, name) for name in (*names, *moves)}
    return counts | {name: _buckets(getattr(state.counters, name)) for name in spreads}


def _buckets(buckets: Buckets) -> pb.Buckets:
    return pb.Buckets(bounds=buckets.bounds, counts=buckets.counts, sum=buckets.sum)


def _preemptions(state: EngineState) -> Figures:
    counters = state.counters
    by_cause = {cause.value: count for cause, count in counters.preempted_for.items()}
    return {"preemptions": counters.preemptions, "preemptions_by_cause": by_cause}


def _step_model(state: EngineState) -> Figures:
    ledger = state.ledger
    return {
        "step_predicted_seconds_total": ledger.predicted_seconds,
        "step_actual_seconds_total": ledger.actual_seconds,
        "step_error_median": ledger.model.median_error,
        "step_margin": ledger.model.margin,
    }


def _batch(state: EngineState) -> Figures:
    return {"batch_urgency": state.ledger.need, "batch_share": state.ledger.batch_share}


def _kv_moves(state: EngineState) -> Figures:
    counters = state.counters
    return {
        "kv_pages_in": counters.kv_pages_in,
        "kv_pages_out": counters.kv_pages_out,
        "kv_seconds_in": counters.kv_seconds_in,
        "kv_fetches": {end.value: count for end, count in counters.kv_fetches.items()},
        "kv_fetching": len(state.moves.imports),
        "kv_leases": len(state.host.leased),
    }


def live_requests(state: EngineState, now: float, limit: int) -> pb.RequestsResponse:
    """Return the number of live requests, the tokens that each tenant has reserved, and at most `limit` requests in
    full, running ones first. `now` is on the engine's clock. A queue of ten thousand costs a few milliseconds."""
    reserved: Counter[str] = Counter()
    for seq in state.sequences.values():
        reserved[seq.request.tenant] += seq.request.origin.reserved_tokens
    shown = islice(chain(state.running.values(), state.waiting), limit)
    return pb.RequestsResponse(
        requests=[_live(seq, seq.id in state.running, now) for seq in shown],
        total=len(state.sequences),
        reserved_tokens=reserved,
    )


def _live(seq: Sequence, running: bool, now: float) -> pb.LiveRequest:
    request = seq.request
    return pb.LiveRequest(
        request_id=request.id,
        origin=origin_to_pb(request.origin),
        tenant=request.tenant,
        lane=LANES[request.lane],
        running=running,
        prompt_tokens=len(request.prompt_ids),
        cached_tokens=seq.num_cached,
        generated_tokens=seq.num_generated,
        max_tokens=request.params.max_tokens,
        age_seconds=max(0.0, now - request.arrival),
        preemptions=seq.num_preemptions,
    )
