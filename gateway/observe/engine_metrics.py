"""Prometheus metrics of an engine's state at the moment of a scrape."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.core.messages.requests import Lane, LaneMode
from engine.pb import engine_pb2 as pb
from engine.rpc.wire import lane_mode_from_pb
from gateway.core.lanes import lane_name
from gateway.observe.adapter_metrics import adapter_gauges
from gateway.observe.buckets import spread
from gateway.observe.lora_metrics import lora_metrics
from gateway.observe.vllm_engine import vllm_metrics
from gateway.observe.vllm_requests import MODEL

MAX_TENANTS = 20
"""Maximum number of tenants with a label of their own: those with the most device seconds. The others share `other`."""

GOAL = ("lane", "goal")
"""Labels, besides the base model's, of metrics about a lane's latency goals. Values of `goal` are `ttft` and `itl`."""
MODES = ("redis", "degraded", "closed", "open")

PAGES = {
    "total_pages": "Pages in the pool.",
    "free_pages": "Free pages in the pool.",
    "kv_pages": "Pages in the pool that hold KV cache of running requests.",
    "cached_pages": "Pages in the pool that hold cached prefixes which no request uses.",
    "adapter_pages": "Pages in the pool that hold adapters.",
    "host_total_pages": "Pages of host memory for KV cache of preempted requests and of evicted prefixes.",
    "host_used_pages": "Pages of host memory that unfinished requests or other engines need; others may be reused.",
}
COUNTERS = {
    "steps": "Engine steps.",
    "late_steps": "Steps that reached the device after it had run out of work.",
    "host_bound_steps": "Late steps that no earlier plan could have prevented: the host was slower than the device.",
    "step_seconds": "Time spent in engine steps.",
    "step_predicted_seconds_total": "Time the step-time model predicted for the steps it could predict.",
    "step_actual_seconds_total": "Time that the predicted steps took.",
    "recomputed_tokens": "Tokens computed again after a preemption.",
    "prompt_tokens": "Prompt tokens computed, or found in the prefix cache.",
    "cached_tokens": "Prompt tokens found in the prefix cache.",
    "generated_tokens": "Tokens sampled.",
    "proposed_tokens": "Tokens that steps computed as proposals.",
    "accepted_tokens": "Proposals that became part of answers.",
    "adapter_loads": "Adapters copied to the device.",
    "adapter_evictions": "Adapters dropped from the device.",
    "adapter_fetches": "Adapters read from disk into host memory.",
    "adapter_fetch_failures": "Reads from disk that ended without an adapter.",
    "adapter_host_evictions": "Adapters dropped from host memory.",
    "pages_saved": "Pages of KV cache copied to host memory.",
    "pages_restored": "Pages of KV cache copied back from host memory.",
    "kv_pages_in": "Pages of KV cache fetched from other engines.",
    "kv_pages_out": "Pages of KV cache given to other engines.",
    "kv_seconds_in": "Time that pages took to come from other engines, after they were computed.",
}
GAUGES = {
    "adapter_host_total_bytes": "Host memory reserved for packed adapters, in bytes.",
    "adapter_host_used_bytes": "Host memory used by packed adapters, in bytes.",
    "step_error_median": "Median of |actual / predicted - 1| over recent steps.",
    "step_margin": "Safety factor by which predicted step times are multiplied.",
    "batch_urgency": "Device time that batch deadlines need over what batch work gets; from 1 on they are at risk.",
    "batch_share": "Share of recent device time spent on batch work while there was any; 1 without batch work.",
    "kv_fetching": "Fetches of KV cache from other engines under way.",
    "kv_leases": "Host pages that other engines may be reading.",
}
HISTOGRAMS = {
    "step_sequences": "Sequences in an engine step.",
    "yield_seconds": "Time from an interactive arrival that only batch work delays to the step that starts it.",
}
TIERS = ("disk", "fetching", "host", "resident")
MOVES = {"host": "adapter_fetch_seconds", "device": "adapter_load_seconds"}
"""Tier that an adapter is moved to -> field of EngineStats with the total seconds of these moves."""
LANE_GAUGES = {
    "requests_running": ("Requests running in the engine.", "running"),
    "requests_waiting": ("Requests waiting in the engine.", "waiting"),
    "oldest_wait_seconds": ("Time the oldest waiting request has waited.", "oldest_wait_seconds"),
    "vtc_gap_seconds": (
        "Difference in service between the most and the least served waiting tenants (VTC).",
        "vtc_gap_seconds",
    ),
    "vtc_bound_seconds": ("Upper bound that the fair scheduler guarantees for vtc_gap_seconds.", "vtc_bound_seconds"),
}
ATTAINMENT = {"ttft": "slo_ttft_attainment", "itl": "slo_itl_attainment"}
TENANT_GAUGES = {
    "tenant_requests_running": ("Requests running in the engine.", "running"),
    "tenant_requests_waiting": ("Requests waiting in the engine.", "waiting"),
    "tenant_device_seconds": (
        "Device time used so far. A gauge, because the tenants with a label of their own may change.",
        "device_seconds",
    ),
}


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """State of the engine of one base model at the moment of a scrape."""

    model: str
    """Name of the base model."""
    info: pb.EngineInfo
    """Empty until an engine was reached."""
    stats: pb.EngineStats | None
    """None means that the engine is not available; then `loralane_engine_up` is the only metric of it."""
    names: Mapping[str, Sequence[str]]
    """All names of an adapter, by its hash."""

    def families(self) -> Iterator[Metric]:
        """Yield the metrics of the engine. Some of those under vLLM's names have the label MODEL already; `by_model`
        adds it to the others."""
        yield _gauge("loralane_engine_up", "1 while the engine answers.", float(self.stats is not None))
        if self.stats is not None:
            yield _description(self.info)
            yield from _lane_metrics(self.stats)
            yield from _tenant_metrics(self.stats.tenants)
            yield from _plain_metrics(self.stats)
            yield _preemptions(self.stats)
            yield _kv_fetches(self.stats)
            yield from _adapter_metrics(self.stats)
            yield from adapter_gauges(self.stats, self.names)
            yield from vllm_metrics(self.stats, self.model)
            yield from _histograms(self.stats)
            yield from lora_metrics(self.stats, self.names, self.model)


class EngineMetrics(Collector):
    """Prometheus collector of the engines' state and of the limiter's, made for one scrape."""

    def __init__(self, engines: Sequence[EngineSnapshot], limiter_modes: Collection[str]) -> None:
        """`engines` has one snapshot for each base model; `limiter_modes` are those of `MODES` by which the limiter
        enforces limits now."""
        self._engines = engines
        self._limiter_modes = limiter_modes

    def collect(self) -> Iterable[Metric]:
        mode = GaugeMetricFamily("loralane_limiter_mode", "1 for the modes of limits in force.", labels=["mode"])
        for name in MODES:
            mode.add_metric([name], float(name in self._limiter_modes))
        yield mode
        yield from by_model({engine.model: engine.families() for engine in self._engines})


def by_model(families: Mapping[str, Iterable[Metric]]) -> Iterator[Metric]:
    """Merge the metric families of all base models, given by the model's name: families of the same name become one,
    and each sample gets the label MODEL if it lacks it."""
    combined: dict[str, Metric] = {}
    for model, metrics in families.items():
        for family in metrics:
            into = combined.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            into.samples += [sample._replace(labels={MODEL: model, **sample.labels}) for sample in family.samples]
    yield from combined.values()


def _description(info: pb.EngineInfo) -> Metric:
    labels = ("architecture", "device", "dtype", "weights")
    family = GaugeMetricFamily("loralane_engine_info", "1; labels describe the engine and its model.", labels=labels)
    family.add_metric([getattr(info, label) for label in labels], 1)
    return family


def _lane_metrics(stats: pb.EngineStats) -> Iterator[Metric]:
    for name, (help, field) in LANE_GAUGES.items():
        gauge = GaugeMetricFamily(f"loralane_{name}", help, labels=["lane"])
        for lane in stats.lanes:
            gauge.add_metric([_lane(lane)], getattr(lane, field))
        yield gauge
    in_time = GaugeMetricFamily(
        "loralane_slo_attainment",
        "Share of recent tokens within the lane's goal, first and later tokens apart; 1 without tokens.",
        labels=GOAL,
    )
    for lane, (goal, field) in product(stats.lanes, ATTAINMENT.items()):
        in_time.add_metric([_lane(lane), goal], getattr(lane, field))
    yield in_time
    mode = GaugeMetricFamily("loralane_lane_mode", "1 for what an operator lets a lane do.", labels=["lane", "mode"])
    for lane, known in product(stats.lanes, LaneMode):
        mode.add_metric([_lane(lane), known.value], float(lane_mode_from_pb(lane.mode) is known))
    yield mode
    busy = CounterMetricFamily("loralane_lane_device_seconds", "Device time of steps spent on a lane.", labels=["lane"])
    for lane in stats.lanes:
        busy.add_metric([_lane(lane)], lane.device_seconds)
    yield busy


def _tenant_metrics(tenants: Sequence[pb.TenantStats]) -> Iterator[Metric]:
    label = _tenant_labels(tenants)
    for name, (help, field) in TENANT_GAUGES.items():
        sums: defaultdict[tuple[str, str], float] = defaultdict(float)
        for tenant in tenants:
            sums[_lane(tenant), label(tenant.tenant)] += getattr(tenant, field)
        gauge = GaugeMetricFamily(f"loralane_{name}", help, labels=["lane", "tenant"])
        for labels, value in sums.items():
            gauge.add_metric(labels, value)
        yield gauge
    served = GaugeMetricFamily(
        "loralane_tenant_served_seconds",
        "Service received divided by weight, which the fair scheduler compares.",
        labels=["lane", "tenant"],
    )
    for tenant in tenants:
        if label(tenant.tenant) == tenant.tenant:  # virtual times of several tenants have no meaningful sum
            served.add_metric([_lane(tenant), tenant.tenant], tenant.served_seconds)
    yield served


def _tenant_labels(tenants: Sequence[pb.TenantStats]) -> Callable[[str], str]:
    totals: defaultdict[str, float] = defaultdict(float)
    for tenant in tenants:
        totals[tenant.tenant] += tenant.device_seconds
    named = set(sorted(totals, key=lambda name: (-totals[name], name))[:MAX_TENANTS])
    return lambda name: name if name in named else "other"


def _plain_metrics(stats: pb.EngineStats) -> Iterator[Metric]:
    for name, help in (PAGES | GAUGES).items():
        yield _gauge(f"loralane_{name}", help, getattr(stats, name))
    for name, help in COUNTERS.items():
        yield CounterMetricFamily(f"loralane_{name.removesuffix('_total')}", help, value=getattr(stats, name))


def _kv_fetches(stats: pb.EngineStats) -> Metric:
    words = "Fetches of KV cache from other engines, by how they ended."
    family = CounterMetricFamily("loralane_kv_fetches", words, labels=["end"])
    for end, count in stats.kv_fetches.items():
        family.add_metric([end], count)
    return family


def _preemptions(stats: pb.EngineStats) -> Metric:
    family = CounterMetricFamily(
        "loralane_preemptions", "Requests preempted, by what their pages or slots were needed for.", labels=["cause"]
    )
    for cause, count in sorted(stats.preemptions_by_cause.items()):
        family.add_metric([cause], count)
    return family


def _adapter_metrics(stats: pb.EngineStats) -> Iterator[Metric]:
    known = GaugeMetricFamily(
        "loralane_adapters", "Adapter versions that the engine knows, by the tier that holds them.", labels=["tier"]
    )
    counts = Counter(adapter.state for adapter in stats.adapters)
    for tier in TIERS:
        known.add_metric([tier], counts[tier])
    yield known
    seconds = CounterMetricFamily(
        "loralane_adapter_load_seconds",
        "Time spent loading adapters into a tier: host memory from disk, the device from host memory.",
        labels=["tier"],
    )
    for tier, field in MOVES.items():
        seconds.add_metric([tier], getattr(stats, field))
    yield seconds


def _histograms(stats: pb.EngineStats) -> Iterator[Metric]:
    for name, help in HISTOGRAMS.items():
        family = HistogramMetricFamily(f"loralane_{name}", help)
        family.add_metric([], *spread(getattr(stats, name)))
        yield family


def _lane(stats: pb.LaneStats | pb.TenantStats) -> str:
    return lane_name(Lane(stats.lane))


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(name, help, value=value)
