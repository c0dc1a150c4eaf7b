"""Prometheus metrics of requests, and of the engine's state at the moment of the scrape.

docs/metrics.md lists all metrics; a test compares it with the code.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from engine.core.config import LaneGoals
from engine.core.messages.requests import Lane
from gateway.observe.adapter_metrics import AdapterTraffic
from gateway.observe.batch_metrics import BatchCounts
from gateway.observe.engine_metrics import EngineMetrics, EngineSnapshot
from gateway.observe.limiter_metrics import LimiterMetrics
from gateway.observe.request_metrics import RequestMetrics
from gateway.observe.static_metrics import StaticMetrics
from gateway.observe.tenant_labels import TenantLabels, without_tenants
from gateway.observe.virtual_models import VirtualModelMetrics
from gateway.observe.vllm_requests import VllmRequests
from gateway.requests.record import RequestRecord

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


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
        tenants = TenantLabels()
        self._requests = RequestMetrics(tuple(goals), tenants, self._registry)
        self.batches = BatchCounts(self._registry)
        self._limiter = LimiterMetrics(tenants, self._registry)
        self.virtual = VirtualModelMetrics(self._registry)
        self._vllm = VllmRequests(tuple(goals), self._registry)
        self._adapters = AdapterTraffic(self._registry)
        self.static = StaticMetrics(goals)

    def collect(self) -> Iterable[Metric]:
        """Return the metric families of requests, limits, batch lines and webhooks, counted by all processes if
        `shared`, without the engine's state."""
        return self._counted().collect()

    def inter_token(self, base_model: str, lane: Lane, seconds: float) -> None:
        self._requests.inter_token(base_model, lane, seconds)

    def finished(self, record: RequestRecord) -> None:
        for counts in (self._requests, self._limiter, self._vllm, self._adapters):
            counts.finished(record)

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


class CollectedFamilies(Collector):
    """Prometheus collector that returns metric families which were collected before."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
