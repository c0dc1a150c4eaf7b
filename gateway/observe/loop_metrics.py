"""Metric of the event loop. Tasks that start and never end are visible here first."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class LoopMetrics(Collector):
    """Counts the tasks of the process that answers the scrape. Each of several gateway processes reports its own."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def collect(self) -> Iterable[Metric]:
        tasks = len(asyncio.all_tasks(self._loop))
        yield GaugeMetricFamily("loralane_asyncio_tasks", "asyncio tasks in the event loop.", tasks)
