"""Exports a gateway's batch work as metrics, read at the moment of a scrape."""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.batches.dispatcher import Dispatcher
from gateway.batches.gate import Gate
from gateway.batches.lease import TaskKind


class BatchMetrics(Collector):
    def __init__(self, dispatcher: Dispatcher, gate: Gate) -> None:
        self._dispatcher = dispatcher
        self._gate = gate

    def collect(self) -> Iterable[Metric]:
        leases = GaugeMetricFamily("loralane_batch_leases", "Batch tasks leased by this process.", labels=["task"])
        for task in get_args(TaskKind):
            leases.add_metric([task], self._dispatcher.leases.get(task, 0))
        backlog, running = self._dispatcher.backlog, self._gate.in_flight
        yield leases
        yield GaugeMetricFamily(
            "loralane_batches_open", "Batches of all tenants that have not ended.", self._dispatcher.open
        )
        yield GaugeMetricFamily(
            "loralane_batch_backlog", "Batch lines that wait in this process for the engine.", backlog
        )
        yield GaugeMetricFamily("loralane_batch_lines_running", "Batch lines that the engine is working on.", running)
