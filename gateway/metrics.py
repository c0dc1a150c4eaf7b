"""Prometheus metrics: what requests lived through, and the engine's state at the moment of the scrape."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.core.types import Lane
from engine.pb import engine_pb2 as pb
from gateway.core.lanes import lane_name
from gateway.generation import RequestRecord

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_TENANTS = 100
"""Tenants with a label of their own; those seen later share `other`."""

TOKEN_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
WAIT_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

MODES = ("redis", "degraded", "closed", "open")


class Metrics:
    """An `Observer`, and the text of /metrics."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._tenants: set[str] = set()
        self._ttft = self._by_lane("time_to_first_token_seconds", "Arrival to first token.", WAIT_SECONDS)
        self._itl = self._by_lane("inter_token_latency_seconds", "Between two tokens of an answer.", TOKEN_SECONDS)
        self._tpot = self._by_lane("time_per_output_token_seconds", "Mean per request, after the first.", TOKEN_SECONDS)
        self._queue = self._by_lane("queue_time_seconds", "Submitted to first worked on.", WAIT_SECONDS)
        self._duration = self._by_lane("request_duration_seconds", "Arrival to end.", WAIT_SECONDS)
        self._requests = self._counter("requests", "Requests by how they ended.", ["lane", "finish", "code"])
        self._tokens = self._counter("tokens", "Tokens that were charged.", ["tenant", "lane", "direction"])
        self._decisions = self._counter("limiter_decisions", "Reservations asked for.", ["decision"])

    def inter_token(self, lane: Lane, seconds: float) -> None:
        self._itl.labels(lane_name(lane)).observe(seconds)

    def finished(self, record: RequestRecord) -> None:
        lane = lane_name(record.lane)
        spans = (
            (self._ttft, record.ttft_seconds),
            (self._tpot, record.tpot_seconds),
            (self._queue, record.queue_seconds),
            (self._duration, record.duration_seconds),
        )
        for histogram, seconds in spans:
            if seconds is not None:
                histogram.labels(lane).observe(seconds)
        self._requests.labels(lane, record.finish, record.error_code).inc()
        self._count_tokens(record, lane)
        self._count_decision(record)

    def render(self, stats: pb.EngineStats | None, names: Mapping[str, str], limiter_mode: str) -> bytes:
        """The text of /metrics.

        Args:
            stats: None while there is no engine.
            names: adapter version -> name.
        """
        snapshot = CollectorRegistry()
        snapshot.register(_Snapshot(stats, names, limiter_mode))
        return generate_latest(self._registry) + generate_latest(snapshot)

    def _by_lane(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"loralane_{name}", help, ["lane"], buckets=buckets, registry=self._registry)

    def _counter(self, name: str, help: str, labels: list[str]) -> Counter:
        return Counter(f"loralane_{name}", help, labels, registry=self._registry)

    def _count_tokens(self, record: RequestRecord, lane: str) -> None:
        if record.refund or record.submitted is None:
            return
        tenant = self._tenant(record.tenant)
        self._tokens.labels(tenant, lane, "prompt").inc(record.prompt_tokens)
        self._tokens.labels(tenant, lane, "completion").inc(record.completion_tokens)

    def _count_decision(self, record: RequestRecord) -> None:
        if record.submitted is not None:
            self._decisions.labels("admitted").inc()
        elif record.status == 429 or record.error_code == "limiter_unavailable":
            self._decisions.labels(record.error_code).inc()

    def _tenant(self, name: str) -> str:
        if len(self._tenants) < MAX_TENANTS:
            self._tenants.add(name)
        return name if name in self._tenants else "other"


class _Snapshot(Collector):
    """An engine's state as metrics, once."""

    def __init__(self, stats: pb.EngineStats | None, names: Mapping[str, str], limiter_mode: str) -> None:
        self._stats = stats
        self._names = names
        self._limiter_mode = limiter_mode

    def collect(self) -> Iterable[Metric]:
        yield _gauge("loralane_engine_up", "1 while the engine answers.", float(self._stats is not None))
        mode = GaugeMetricFamily("loralane_limiter_mode", "1 for the mode in force.", labels=["mode"])
        for name in MODES:
            mode.add_metric([name], float(name == self._limiter_mode))
        yield mode
        if self._stats is not None:
            yield from _lane_metrics(self._stats)
            yield from _page_metrics(self._stats)
            yield from _counters(self._stats)
            yield _lora_info(self._stats, self._names)


def _lane_metrics(stats: pb.EngineStats) -> Iterable[Metric]:
    running = GaugeMetricFamily("loralane_requests_running", "Running in the engine.", labels=["lane"])
    waiting = GaugeMetricFamily("loralane_requests_waiting", "Waiting in the engine.", labels=["lane"])
    for lane in stats.lanes:
        running.add_metric([lane_name(Lane(lane.lane))], lane.running)
        waiting.add_metric([lane_name(Lane(lane.lane))], lane.waiting)
    yield running
    yield waiting
    yield _gauge("vllm:num_requests_running", "Running requests.", sum(lane.running for lane in stats.lanes))
    yield _gauge("vllm:num_requests_waiting", "Waiting requests.", sum(lane.waiting for lane in stats.lanes))


def _page_metrics(stats: pb.EngineStats) -> Iterable[Metric]:
    for name in ("total_pages", "free_pages", "kv_pages", "cached_pages", "adapter_pages"):
        yield _gauge(f"loralane_{name}", f"Pages of the pool: {name.split('_')[0]}.", getattr(stats, name))
    usage = stats.kv_pages / stats.total_pages if stats.total_pages else 0.0
    yield _gauge("vllm:kv_cache_usage_perc", "Share of the pool that holds KV in use, 0 to 1.", usage)
    yield _gauge("loralane_integrity_violations", "Of the engine's integrity check.", len(stats.violations))


def _counters(stats: pb.EngineStats) -> Iterable[Metric]:
    helps = {
        "steps": "Engine steps.",
        "step_seconds": "Time spent in engine steps.",
        "preemptions": "Running requests put back to wait.",
        "recomputed_tokens": "Computed again after a preemption.",
        "cached_tokens": "Prompt tokens found in the prefix cache.",
        "generated_tokens": "Tokens sampled.",
        "adapter_loads": "Adapters copied to the device.",
        "adapter_evictions": "Adapters dropped from the device.",
    }
    for name, help in helps.items():
        yield CounterMetricFamily(f"loralane_{name}", help, value=getattr(stats, name))


def _lora_info(stats: pb.EngineStats, names: Mapping[str, str]) -> Metric:
    """What cluster routers read to send a request to where its adapter is. The value is a Unix time, as vLLM has it."""
    adapters = [(names.get(adapter.adapter, adapter.adapter), adapter) for adapter in stats.adapters]
    running = ",".join(sorted(name for name, adapter in adapters if adapter.running))
    waiting = ",".join(sorted(name for name, adapter in adapters if adapter.waiting))
    labels = {"max_lora": str(len(adapters)), "running_lora_adapters": running, "waiting_lora_adapters": waiting}
    info = GaugeMetricFamily("vllm:lora_requests_info", "Adapters in use and waited for.", labels=list(labels))
    info.add_metric(list(labels.values()), time.time())
    return info


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(name, help, value=value)
