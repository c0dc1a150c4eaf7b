"""Prometheus metrics of requests, and of the engine's state at the moment of the scrape.

docs/metrics.md lists all metrics; a test compares it with the code.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import chain
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from engine.core.config import BATCH_GOALS, INTERACTIVE_GOALS, LaneGoals
from engine.core.messages.requests import Lane
from gateway.core.lanes import lane_name
from gateway.observe.adapter_metrics import AdapterTraffic
from gateway.observe.engine_metrics import GOAL, EngineMetrics, EngineSnapshot, by_model
from gateway.observe.virtual_models import VirtualModelMetrics
from gateway.observe.vllm_requests import MODEL, VllmRequests
from gateway.requests.record import RequestRecord

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_TENANTS = 100
"""Maximum number of tenants with a label of their own: those seen first. The others share `other`."""

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
LIMITER_CALL = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25)

DEFAULT_GOALS: Mapping[Lane, LaneGoals] = {Lane.INTERACTIVE: INTERACTIVE_GOALS, Lane.BATCH: BATCH_GOALS}
BATCH_OUTCOMES = ("completed", "failed")
WEBHOOK_OUTCOMES = ("delivered", "failed", "given_up")
DECISIONS = ("admitted", "rate_limit_exceeded", "insufficient_quota", "limiter_unavailable")


class Metrics:
    """An `Observer` that counts this process's requests in Prometheus metrics and renders the text of /metrics."""

    def __init__(self, goals: Mapping[str, Mapping[Lane, LaneGoals]], shared: Path | None = None) -> None:
        """
        Args:
            goals: goals of the lanes, by the names of the base models, in the order of the configuration.
            shared: folder in which the processes of one `serve` count together (prometheus_client's multiprocess mode,
                which must be set before the library is imported). Each process then reports the counts of all. None
                means that this process counts alone.
        """
        disable_created_metrics()  # in the text format they add a gauge to every series, which is not used
        self._registry = CollectorRegistry()
        self._extra = CollectorRegistry()
        self._shared = shared
        self._models = tuple(goals)
        self._tenants: set[str] = set()
        self._ttft = self._by_lane(
            "time_to_first_token_seconds", "Time from the arrival of a request to its first token.", FIRST_TOKEN
        )
        self._itl = self._by_lane("inter_token_latency_seconds", "Time between two tokens of an answer.", TOKEN)
        self._tpot = self._by_lane(
            "time_per_output_token_seconds", "Mean time per output token after the first, one value per request.", TOKEN
        )
        self._queue = self._by_lane(
            "queue_time_seconds", "Time a request waits in the engine before its first step.", QUEUE
        )
        self._duration = self._by_lane(
            "request_duration_seconds", "Time from the arrival of a request to its end.", DURATION
        )
        self._moves = self._by_lane(
            "request_move_seconds",
            "Time without an engine process of each request that is moved to the next one.",
            DURATION,
        )
        self._requests = self._counter(
            "requests", "Requests that have ended, by finish reason and error code.", [MODEL, "lane", "finish", "code"]
        )
        self._tokens = self._counter("tokens", "Tokens charged to tenants.", [MODEL, "tenant", "lane", "direction"])
        self._routes = self._counter(
            "routing_decisions", "Answers sent to one of several engines, by the router's reason.", [MODEL, "reason"]
        )
        self._batch_lines = self._counter("batch_lines", "Batch lines answered, by outcome.", ["outcome"])
        for outcome in BATCH_OUTCOMES:
            self._batch_lines.labels(outcome)
        self._wasted_tokens = self._counter(
            "batch_wasted_tokens",
            "Tokens of runs of batch lines that no tenant is charged for: others count.",
            [],
        )
        self._webhooks = self._counter("webhook_tries", "Webhook deliveries tried, by outcome.", ["outcome"])
        for outcome in WEBHOOK_OUTCOMES:
            self._webhooks.labels(outcome)
        self._count_limits()
        self._virtual = VirtualModelMetrics(self._registry)
        self.routed = self._virtual.routed
        self._vllm = VllmRequests(self._models, self._registry)
        self._adapters = AdapterTraffic(self._registry)
        self.static = StaticMetrics(goals)

    def collect(self) -> Iterable[Metric]:
        """Return the metric families of requests, limits, batch lines and webhooks, counted by all processes if
        `shared`, without the engine's state."""
        return self._counted().collect()

    def inter_token(self, base_model: str, lane: Lane, seconds: float) -> None:
        self._itl.observe(base_model, lane, seconds)

    def finished(self, record: RequestRecord) -> None:
        lane = "none" if record.lane is None else lane_name(record.lane)
        spans = (
            (self._ttft, record.times.ttft_seconds),
            (self._tpot, record.tpot_seconds),
            (self._queue, record.times.queue_seconds),
            (self._duration, record.times.duration_seconds),
        )
        for lanes, seconds in spans:
            if seconds is not None and record.lane is not None:
                lanes.observe(record.served.base_model, record.lane, seconds)
        if record.lane is not None:
            for seconds in record.engines.moves:
                self._moves.observe(record.served.base_model, record.lane, seconds)
        for reason in record.engines.routes:
            self._routes.labels(record.served.base_model, reason).inc()
        self._requests.labels(record.served.base_model, lane, record.outcome.finish, record.outcome.error_code).inc()
        self._count_tokens(record, lane)
        self._count_decision(record)
        self._vllm.finished(record)
        self._adapters.finished(record)

    def batch_line(self, outcome: str) -> None:
        """Count an answered line of a batch. `outcome` is one of BATCH_OUTCOMES."""
        self._batch_lines.labels(outcome).inc()

    def wasted_tokens(self, count: int) -> None:
        """Count tokens of runs of a batch's lines whose answers were dropped, because the lines run again."""
        self._wasted_tokens.inc(count)

    def count_webhook(self, outcome: str) -> None:
        """Count an attempt to deliver a webhook. `outcome` is one of WEBHOOK_OUTCOMES."""
        self._webhooks.labels(outcome).inc()

    def register(self, collector: Collector) -> None:
        """Have `collector` be collected at every scrape, in addition to the metrics of this class."""
        self._extra.register(collector)

    def render(
        self,
        engines: Sequence[EngineSnapshot],
        limiter_modes: Collection[str],
        *,
        tenants: bool = True,
    ) -> bytes:
        """Return the text of /metrics: counts of requests, registered collectors, static figures and the engine's
        state. `engines` has a snapshot for each base model; `limiter_modes` are the modes in which the limiter enforces
        limits now. Unless `tenants` is true, `without_tenants` removes what tells tenants apart."""
        counted = list(self.collect())
        engine = EngineMetrics(engines, limiter_modes)
        rest = (self._vllm.summed(counted), self._extra.collect(), self.static.collect(), engine.collect())
        families = [*counted, *chain.from_iterable(rest)]
        registry = CollectorRegistry()
        registry.register(CollectedFamilies(families if tenants else list(without_tenants(families))))
        return generate_latest(registry)

    def _counted(self) -> CollectorRegistry:
        if self._shared is None:
            return self._registry
        together = CollectorRegistry()
        MultiProcessCollector(together, path=str(self._shared))
        return together

    def _by_lane(self, name: str, help: str, buckets: tuple[float, ...]) -> LaneHistogram:
        histogram = Histogram(f"loralane_{name}", help, [MODEL, "lane"], buckets=buckets, registry=self._registry)
        return LaneHistogram(histogram, self._models)

    def _counter(self, name: str, help: str, labels: list[str]) -> Counter:
        return Counter(f"loralane_{name}", help, labels, registry=self._registry)

    def _count_limits(self) -> None:
        self._decisions = self._counter(
            "limiter_decisions", "Reservations requested of the limiter, by decision.", ["decision"]
        )
        for decision in DECISIONS:
            self._decisions.labels(decision)
        self._refusals = self._counter(
            "limiter_refusals",
            "Requests refused by a limit, counted at the scope with the least headroom.",
            ["tenant", "scope", "limit"],
        )
        self._shadowed = self._counter(
            "limiter_shadow_refusals", "Requests admitted that a shadow limit would have refused.", ["scope", "limit"]
        )
        self._reserve = Histogram(
            "loralane_limiter_reserve_seconds",
            "Time the limiter takes to decide.",
            buckets=LIMITER_CALL,
            registry=self._registry,
        )

    def _count_tokens(self, record: RequestRecord, lane: str) -> None:
        if not record.bill.is_due:
            return
        labels = (record.served.base_model, self._tenant(record.caller.tenant), lane)
        self._tokens.labels(*labels, "prompt").inc(record.work.prompt_tokens)
        self._tokens.labels(*labels, "completion").inc(record.work.completion_tokens)

    def _count_decision(self, record: RequestRecord) -> None:
        times, outcome = record.times, record.outcome
        if times.reserve_seconds is not None:
            self._reserve.observe(times.reserve_seconds)
        for scope, limit in record.bill.shadowed:
            self._shadowed.labels(scope, limit).inc()
        if times.reserving is None:
            return
        if times.submitted is not None:
            self._decisions.labels("admitted").inc()
        elif outcome.error_code in DECISIONS:
            self._decisions.labels(outcome.error_code).inc()
            if "limit" in outcome.error_metadata:
                kind = outcome.error_metadata["scope"].partition(":")[0]
                self._refusals.labels(self._tenant(record.caller.tenant), kind, outcome.error_metadata["limit"]).inc()

    def _tenant(self, name: str) -> str:
        if len(self._tenants) < MAX_TENANTS:
            self._tenants.add(name)
        return name if name in self._tenants else "other"


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


class CollectedFamilies(Collector):
    """Prometheus collector that returns metric families which were collected before."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


class StaticMetrics(Collector):
    """Prometheus collector of the version, the base models and the `goals` of their lanes, which a reload replaces."""

    def __init__(self, goals: Mapping[str, Mapping[Lane, LaneGoals]]) -> None:
        """`goals` has the goals of the lanes by the name of the base model."""
        self.goals = goals

    def collect(self) -> Iterator[Metric]:
        yield from by_model({model: _static_metrics(goals) for model, goals in self.goals.items()})


def _static_metrics(goals: Mapping[Lane, LaneGoals]) -> Iterator[Metric]:
    """Yield the metrics of one base model that requests do not change: version and lane goals. `by_model` adds the
    label with the model's name."""
    build = GaugeMetricFamily(
        "loralane_build_info", "1; the version and the base model are labels.", labels=["version"]
    )
    build.add_metric([version("loralane")], 1)
    share = GaugeMetricFamily(
        "loralane_slo_target", "Share of tokens that should meet the lane's goal.", labels=["lane"]
    )
    seconds = GaugeMetricFamily("loralane_slo_goal_seconds", "Latency goal of a lane.", labels=GOAL)
    for lane, promised in goals.items():
        name = lane_name(lane)
        share.add_metric([name], promised.attainment)
        seconds.add_metric([name, "ttft"], promised.ttft_s)
        seconds.add_metric([name, "itl"], promised.itl_s)
    yield from (build, share, seconds)


TENANT = "tenant"


def without_tenants(families: Iterable[Metric]) -> Iterator[Metric]:
    """Drop the label `tenant`: counters and histograms are summed over tenants, gauges by tenant are left out."""
    for family in families:
        if not any(TENANT in sample.labels for sample in family.samples):
            yield family
        elif family.type != "gauge":
            yield _summed(family)


def _summed(family: Metric) -> Metric:
    sums: defaultdict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
    for sample in family.samples:
        labels = tuple((name, value) for name, value in sample.labels.items() if name != TENANT)
        sums[sample.name, labels] += sample.value
    total = Metric(family.name, family.documentation, family.type)
    for (name, labels), value in sums.items():
        total.add_sample(name, dict(labels), value)
    return total
