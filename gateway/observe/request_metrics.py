"""Prometheus metrics of requests: how long they took, how they ended, which engine they got, and their tokens."""

from __future__ import annotations

from collections.abc import Collection

from prometheus_client import CollectorRegistry, Counter, Histogram

from engine.core.messages.requests import Lane
from gateway.core.lanes import lane_name
from gateway.observe.tenant_labels import TenantLabels
from gateway.observe.vllm_requests import MODEL
from gateway.requests.record import RequestRecord

# Bounds of histograms, in seconds. They include the lanes' default goals, so that the share of tokens in time can be
# read exactly. A GPU produces a token every few milliseconds, and batch work may wait for an hour.
FIRST_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0),
    *(30.0, 60.0, 300.0, 900.0, 3600.0),
)
TOKEN = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0),
    *(2.5, 10.0, 60.0),
)
QUEUE = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)
DURATION = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)


class RequestMetrics:
    """Counts requests that have ended, by base model and lane."""

    def __init__(self, models: Collection[str], tenants: TenantLabels, registry: CollectorRegistry) -> None:
        """`models` are the base models whose series exist from the start."""

        def by_lane(name: str, help: str, buckets: tuple[float, ...]) -> LaneHistogram:
            labels = [MODEL, "lane"]
            return LaneHistogram(
                Histogram(f"loralane_{name}", help, labels, buckets=buckets, registry=registry), models
            )

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"loralane_{name}", help, [MODEL, *labels], registry=registry)

        self._tenants = tenants
        self._ttft = by_lane(
            "time_to_first_token_seconds", "Time from the arrival of a request to its first token.", FIRST_TOKEN
        )
        self._itl = by_lane("inter_token_latency_seconds", "Time between two tokens of an answer.", TOKEN)
        self._tpot = by_lane(
            "time_per_output_token_seconds", "Mean time per output token after the first, one value per request.", TOKEN
        )
        self._queue = by_lane("queue_time_seconds", "Time a request waits in the engine before its first step.", QUEUE)
        self._duration = by_lane("request_duration_seconds", "Time from the arrival of a request to its end.", DURATION)
        self._moves = by_lane(
            "request_move_seconds",
            "Time without an engine process of each request that is moved to the next one.",
            DURATION,
        )
        self._requests = counter(
            "requests", "Requests that have ended, by finish reason and error code.", "lane", "finish", "code"
        )
        self._tokens = counter("tokens", "Tokens charged to tenants.", "tenant", "lane", "direction")
        self._routes = counter(
            "routing_decisions", "Answers sent to one of several engines, by the router's reason.", "reason"
        )

    def inter_token(self, base_model: str, lane: Lane, seconds: float) -> None:
        self._itl.observe(base_model, lane, seconds)

    def finished(self, record: RequestRecord) -> None:
        lane = "none" if record.lane is None else lane_name(record.lane)
        if record.lane is not None:
            self._observe_times(record, record.lane)
        for reason in record.engines.routes:
            self._routes.labels(record.served.base_model, reason).inc()
        self._requests.labels(record.served.base_model, lane, record.outcome.finish, record.outcome.error_code).inc()
        if record.bill.is_due:
            labels = (record.served.base_model, self._tenants.label(record.caller.tenant), lane)
            self._tokens.labels(*labels, "prompt").inc(record.work.prompt_tokens)
            self._tokens.labels(*labels, "completion").inc(record.work.completion_tokens)

    def _observe_times(self, record: RequestRecord, lane: Lane) -> None:
        spans = (
            (self._ttft, record.times.ttft_seconds),
            (self._tpot, record.tpot_seconds),
            (self._queue, record.times.queue_seconds),
            (self._duration, record.times.duration_seconds),
        )
        for lanes, seconds in (*spans, *((self._moves, seconds) for seconds in record.engines.moves)):
            if seconds is not None:
                lanes.observe(record.served.base_model, lane, seconds)


class LaneHistogram:
    """A histogram by base model and lane."""

    def __init__(self, histogram: Histogram, models: Collection[str]) -> None:
        """`models` are the base models whose series exist from the start."""
        self._histogram = histogram
        self._series = {(model, lane): histogram.labels(model, lane_name(lane)) for model in models for lane in Lane}

    def observe(self, model: str, lane: Lane, seconds: float) -> None:
        """Count a value, in seconds. `model` is empty for a request that was refused before its model was known."""
        series = self._series.get((model, lane)) or self._histogram.labels(model, lane_name(lane))
        series.observe(seconds)
