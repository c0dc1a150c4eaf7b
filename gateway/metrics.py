"""Prometheus metrics: what requests lived through, and the engine's state at the moment of the scrape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from engine.core.types import Lane
from engine.pb import engine_pb2 as pb
from gateway.core.lanes import lane_name
from gateway.engine_metrics import EngineMetrics
from gateway.generation import RequestRecord

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_TENANTS = 100
"""Tenants with a label of their own; those seen later share `other`."""

TOKEN_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
WAIT_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metrics:
    """An `Observer`, and the text of /metrics."""

    def __init__(self, shared: Path | None = None) -> None:
        """`shared`: where the processes of one `serve` count together (prometheus_client's multiprocess mode, which the
        library was imported in); each then tells what all of them have counted. None: this process counts alone."""
        self._registry = CollectorRegistry()
        self._shared = shared
        self._tenants: set[str] = set()
        self._ttft = self._by_lane("time_to_first_token_seconds", "Arrival to first token.", WAIT_SECONDS)
        self._itl = self._by_lane("inter_token_latency_seconds", "Between two tokens of an answer.", TOKEN_SECONDS)
        self._tpot = self._by_lane("time_per_output_token_seconds", "Mean per request, after the first.", TOKEN_SECONDS)
        self._queue = self._by_lane("queue_time_seconds", "Submitted to first worked on.", WAIT_SECONDS)
        self._duration = self._by_lane("request_duration_seconds", "Arrival to end.", WAIT_SECONDS)
        histograms = (self._ttft, self._tpot, self._queue, self._duration)
        self._spans = {lane: [each.labels(lane_name(lane)) for each in histograms] for lane in Lane}
        self._gaps = {lane: self._itl.labels(lane_name(lane)) for lane in Lane}
        self._requests = self._counter("requests", "Requests by how they ended.", ["lane", "finish", "code"])
        self._tokens = self._counter("tokens", "Tokens that were charged.", ["tenant", "lane", "direction"])
        self._decisions = self._counter("limiter_decisions", "Reservations asked for.", ["decision"])
        self._shadowed = self._counter(
            "limiter_shadow_refusals", "Admitted, though a limit in shadow said no.", ["scope", "limit"]
        )

    def inter_token(self, lane: Lane, seconds: float) -> None:
        self._gaps[lane].observe(seconds)

    def finished(self, record: RequestRecord) -> None:
        lane = lane_name(record.lane)
        spans = (record.ttft_seconds, record.tpot_seconds, record.queue_seconds, record.duration_seconds)
        for histogram, seconds in zip(self._spans[record.lane], spans, strict=True):
            if seconds is not None:
                histogram.observe(seconds)
        self._requests.labels(lane, record.finish, record.error_code).inc()
        self._count_tokens(record, lane)
        self._count_decision(record)

    def render(self, stats: pb.EngineStats | None, names: Mapping[str, Sequence[str]], limiter_mode: str) -> bytes:
        """The text of /metrics.

        Args:
            stats: None while there is no engine.
            names: adapter version -> every name it goes by.
        """
        snapshot = CollectorRegistry()
        snapshot.register(EngineMetrics(stats, names, limiter_mode))
        return generate_latest(self._counted()) + generate_latest(snapshot)

    def _counted(self) -> CollectorRegistry:
        if self._shared is None:
            return self._registry
        together = CollectorRegistry()
        MultiProcessCollector(together, path=str(self._shared))
        return together

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
        for scope, limit in record.shadowed:
            self._shadowed.labels(scope, limit).inc()
        if record.submitted is not None:
            self._decisions.labels("admitted").inc()
        elif record.status == 429 or record.error_code == "limiter_unavailable":
            self._decisions.labels(record.error_code).inc()

    def _tenant(self, name: str) -> str:
        if len(self._tenants) < MAX_TENANTS:
            self._tenants.add(name)
        return name if name in self._tenants else "other"
