"""The event loop as a metric: what is begun and never ends shows here first."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class LoopMetrics(Collector):
    """Of the process that answers; each of several gateways has its own."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def collect(self) -> Iterable[Metric]:
        tasks = len(asyncio.all_tasks(self._loop))
        yield GaugeMetricFamily("loralane_asyncio_tasks", "asyncio tasks in the event loop.", tasks)
