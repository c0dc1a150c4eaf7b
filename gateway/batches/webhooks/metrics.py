"""Exports the number of undelivered webhook events as a metric."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class Holding(Protocol):
    @property
    def pending(self) -> int: ...


class WebhookMetrics(Collector):
    """Exports the size of the outbox. All gateways share the outbox, so read one gateway's metric, not their sum."""

    def __init__(self, couriers: Collection[Holding]) -> None:
        self._couriers = couriers

    def collect(self) -> Iterable[Metric]:
        pending = sum(courier.pending for courier in self._couriers)
        yield GaugeMetricFamily(
            "loralane_webhooks_pending", "Webhook events that have not been delivered yet.", pending
        )
