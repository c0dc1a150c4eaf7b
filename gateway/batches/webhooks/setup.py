"""Starts the delivery of webhook events to the endpoints in the configuration section `batches.webhooks`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Protocol

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from redis.asyncio import Redis

from gateway.config.file import ConfigError
from gateway.config.webhooks import WebhookConfig
from gateway.observe.metrics import Metrics


@asynccontextmanager
async def open_webhooks(
    client: Redis, prefix: str, endpoints: Mapping[str, WebhookConfig], metrics: Metrics
) -> AsyncIterator[None]:
    """Deliver webhook events to the `endpoints` (by tenant) and export metrics until the context is left. `prefix` is
    the prefix of all Redis keys. Raises ConfigError if the extra `webhooks` is not installed, but endpoints are
    configured."""
    if not endpoints:
        metrics.register(WebhookMetrics(()))
        yield
        return
    try:
        from gateway.batches.webhooks.delivery import delivering
    except ImportError as error:
        raise ConfigError("batches.webhooks: needs pip install 'loralane[webhooks]'") from error
    async with delivering(client, prefix, endpoints, metrics.batches.webhook) as couriers:
        metrics.register(WebhookMetrics(couriers))
        yield


class PendingEvents(Protocol):
    @property
    def pending(self) -> int: ...


class WebhookMetrics(Collector):
    """Exports the number of undelivered events. All gateways share the outbox, so read one gateway's metric only."""

    def __init__(self, couriers: Collection[PendingEvents]) -> None:
        self._couriers = couriers

    def collect(self) -> Iterable[Metric]:
        pending = sum(courier.pending for courier in self._couriers)
        yield GaugeMetricFamily(
            "loralane_webhooks_pending", "Webhook events that have not been delivered yet.", pending
        )
