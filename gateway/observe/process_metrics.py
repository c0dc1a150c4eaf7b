"""Prometheus metrics of a gateway process: grammar checks, event loop tasks, its disk, and used tokens that are not
recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from engine.grammar_check.job import Reason
from engine.grammar_check.pool import GrammarPool
from gateway.core.space import Disk


class GrammarMetrics(Collector):
    """Prometheus collector of the grammar pool's totals since this gateway process started."""

    def __init__(self, pool: GrammarPool) -> None:
        self._pool = pool

    def collect(self) -> Iterable[Metric]:
        counts = self._pool.counts
        refused = CounterMetricFamily("loralane_grammars_refused", "Grammars refused, by reason.", labels=["reason"])
        for reason in Reason:
            refused.add_metric([reason.value], counts.refused[reason])
        yield refused
        help_text = "Grammar worker processes that were replaced because they died, grew or were slow."
        yield CounterMetricFamily("loralane_grammar_workers_replaced", help_text, counts.replaced)
        yield SummaryMetricFamily(
            "loralane_grammar_check_seconds",
            "Time from a request naming a grammar to its verdict, remembered verdicts included.",
            counts.answered,
            counts.waited_seconds,
        )


class LoopMetrics(Collector):
    """Prometheus collector of the number of asyncio tasks in `loop`, that is, of this gateway process alone."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def collect(self) -> Iterable[Metric]:
        tasks = len(asyncio.all_tasks(self._loop))
        yield GaugeMetricFamily("loralane_asyncio_tasks", "asyncio tasks in the event loop.", tasks)


class UndeliveredUsage(Protocol):
    """Numbers of used tokens that are not in the usage records: still to be delivered to Redis, or lost."""

    @property
    def undelivered_tokens(self) -> int: ...

    @property
    def lost_tokens(self) -> int: ...


class UsageMetrics(Collector):
    def __init__(self, uncounted: UndeliveredUsage) -> None:
        self._uncounted = uncounted

    def collect(self) -> Iterable[Metric]:
        waiting, lost = self._uncounted.undelivered_tokens, self._uncounted.lost_tokens
        yield GaugeMetricFamily(
            "loralane_usage_undelivered_tokens",
            "Tokens used while Redis was unreachable that are still to be recorded.",
            waiting,
        )
        yield CounterMetricFamily("loralane_usage_lost_tokens", "Tokens used whose record was lost.", lost)


class DiskMetrics(Collector):
    """Prometheus collector of the free space of the data directory's disk, and of the reserve that stays free there. A
    disk that cannot be measured has no metrics."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def collect(self) -> Iterable[Metric]:
        try:
            free, reserve = self._disk.free, self._disk.reserve
        except OSError:
            return
        yield GaugeMetricFamily("loralane_disk_free_bytes", "Free space of the data directory's disk.", free)
        yield GaugeMetricFamily(
            "loralane_disk_reserve_bytes",
            "Free space that answers of batches leave; uploads leave twice as much.",
            reserve,
        )
