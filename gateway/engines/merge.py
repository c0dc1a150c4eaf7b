"""Combines what several engines of one base model report about themselves into one report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, TypeVar

from engine.pb import engine_pb2 as pb

M = TypeVar("M")

MEANS = frozenset(("step_error_median", "batch_share"))
"""Fields of EngineStats that are averaged."""
MAXIMA = frozenset(("step_margin", "batch_urgency"))
"""Fields of EngineStats of which the largest counts."""
SEPARATE = frozenset(("lanes", "adapters", "tenants", "violations", "preemptions_by_cause", "kv_fetches"))
"""Fields of EngineStats that are no numbers. All other fields are summed, those with counts in buckets bucket by
bucket."""
TIERS = ("disk", "fetching", "host", "resident")
"""States of an adapter, from the slowest to the fastest to use."""


def merge_info(infos: Sequence[pb.EngineInfo]) -> pb.EngineInfo:
    """Return the description of several engines as one: sums of sequences, pages and adapter memory, the shortest
    context, the slowest speed, and the other fields of the first. Raises IndexError if `infos` is empty."""
    merged = pb.EngineInfo()
    merged.CopyFrom(infos[0])
    merged.max_model_len = min(info.max_model_len for info in infos)
    merged.max_seqs = sum(info.max_seqs for info in infos)
    merged.num_pages = sum(info.num_pages for info in infos)
    for name in ("host_pages", "adapter_pages", "host_adapter_bytes"):
        setattr(merged.outlook, name, sum(getattr(info.outlook, name) for info in infos))
    merged.outlook.decode_seconds = max(info.outlook.decode_seconds for info in infos)
    merged.outlook.prompt_tokens = min(info.outlook.prompt_tokens for info in infos)
    return merged


def merge_stats(all_stats: Sequence[pb.EngineStats]) -> pb.EngineStats:
    """Return the statistics of several engines as one. Raises IndexError if there are none."""
    if len(all_stats) == 1:
        return all_stats[0]
    causes: Counter[str] = Counter()
    fetches: Counter[str] = Counter()
    for stats in all_stats:
        causes.update(stats.preemptions_by_cause)
        fetches.update(stats.kv_fetches)
    lanes = [lane for stats in all_stats for lane in stats.lanes]
    tenants = [tenant for stats in all_stats for tenant in stats.tenants]
    adapters = [adapter for stats in all_stats for adapter in stats.adapters]
    return pb.EngineStats(
        lanes=[merge_lanes(group) for group in _grouped(lanes, attrgetter("lane"))],
        tenants=[merge_tenants(group) for group in _grouped(tenants, attrgetter("lane", "tenant"))],
        adapters=[merge_adapters(group) for group in _grouped(adapters, attrgetter("adapter"))],
        violations=[violation for stats in all_stats for violation in stats.violations],
        preemptions_by_cause=causes,
        kv_fetches=fetches,
        **_numbers(all_stats),
    )


def merge_requests(answers: Sequence[pb.RequestsResponse], limit: int) -> pb.RequestsResponse:
    """Return the live requests of several engines as one answer with at most `limit` requests, running ones first."""
    reserved: Counter[str] = Counter()
    for answer in answers:
        reserved.update(answer.reserved_tokens)
    requests = [request for answer in answers for request in answer.requests]
    requests.sort(key=lambda request: not request.running)
    return pb.RequestsResponse(
        requests=requests[:limit], total=sum(answer.total for answer in answers), reserved_tokens=reserved
    )


def merge_lanes(lanes: Sequence[pb.LaneStats]) -> pb.LaneStats:
    """Return the statistics of one lane in several engines as one. Its attainments are averages, weighted by the device
    time spent on the lane. The lane is open if it is open in any engine."""
    weights = [lane.device_seconds for lane in lanes]
    return pb.LaneStats(
        lane=lanes[0].lane,
        running=sum(lane.running for lane in lanes),
        waiting=sum(lane.waiting for lane in lanes),
        oldest_wait_seconds=max(lane.oldest_wait_seconds for lane in lanes),
        slo_ttft_attainment=_average([lane.slo_ttft_attainment for lane in lanes], weights),
        slo_itl_attainment=_average([lane.slo_itl_attainment for lane in lanes], weights),
        device_seconds=sum(weights),
        vtc_gap_seconds=max(lane.vtc_gap_seconds for lane in lanes),
        vtc_bound_seconds=max(lane.vtc_bound_seconds for lane in lanes),
        mode=next((lane.mode for lane in lanes if lane.mode == pb.LANE_MODE_OPEN), lanes[0].mode),
        preemptions=sum(lane.preemptions for lane in lanes),
    )


def merge_tenants(tenants: Sequence[pb.TenantStats]) -> pb.TenantStats:
    """Return the statistics of one tenant in one lane of several engines as one: all are sums."""
    return pb.TenantStats(
        lane=tenants[0].lane,
        tenant=tenants[0].tenant,
        running=sum(tenant.running for tenant in tenants),
        waiting=sum(tenant.waiting for tenant in tenants),
        device_seconds=sum(tenant.device_seconds for tenant in tenants),
        served_seconds=sum(tenant.served_seconds for tenant in tenants),
    )


def merge_adapters(copies: Sequence[pb.AdapterStats]) -> pb.AdapterStats:
    """Return the statistics of one adapter in several engines as one: counts and pages are summed, the state is that
    of the engine where it is the fastest to use."""
    idle = [copy.idle_seconds for copy in copies if copy.HasField("idle_seconds")]
    return pb.AdapterStats(
        adapter=copies[0].adapter,
        state=max((copy.state for copy in copies), key=TIERS.index),
        pages=sum(copy.pages for copy in copies),
        running=sum(copy.running for copy in copies),
        waiting=sum(copy.waiting for copy in copies),
        rank=max(copy.rank for copy in copies),
        bytes=max(copy.bytes for copy in copies),
        hits=sum(copy.hits for copy in copies),
        loads=sum(copy.loads for copy in copies),
        fetches=sum(copy.fetches for copy in copies),
        last_load_seconds=max(copy.last_load_seconds for copy in copies),
        last_fetch_seconds=max(copy.last_fetch_seconds for copy in copies),
        idle_seconds=min(idle, default=None),
        pinned=any(copy.pinned for copy in copies),
        error=next((copy.error for copy in copies if copy.error), ""),
    )


def _numbers(all_stats: Sequence[pb.EngineStats]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for name in (field.name for field in pb.EngineStats.DESCRIPTOR.fields if field.name not in SEPARATE):
        values = [getattr(stats, name) for stats in all_stats]
        if isinstance(values[0], pb.Buckets):
            merged[name] = _merge_buckets(values)
        elif name in MAXIMA:
            merged[name] = max(values)
        else:
            merged[name] = sum(values) / len(values) if name in MEANS else sum(values)
    return merged


def _merge_buckets(spreads: Sequence[pb.Buckets]) -> pb.Buckets:
    """Return the sum of several histograms with the same buckets. Engines of an earlier release send empty ones, which
    are left out."""
    known = [spread for spread in spreads if spread.counts]
    counts = [sum(column) for column in zip(*(spread.counts for spread in known), strict=True)]
    bounds = known[0].bounds if known else ()
    return pb.Buckets(bounds=bounds, counts=counts, sum=sum(spread.sum for spread in known))


def _grouped(items: Iterable[M], key: Callable[[M], object]) -> Iterable[list[M]]:
    """Return the items in groups of the same key, in the order in which the keys first appear."""
    groups: dict[object, list[M]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups.values()


def _average(values: Sequence[float], weights: Sequence[float]) -> float:
    total = sum(weights)
    if not total:
        return sum(values) / len(values)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / total
