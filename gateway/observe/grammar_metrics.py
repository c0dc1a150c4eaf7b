"""Metrics of the child processes that compile tenants' grammars."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from engine.grammar_check.job import Reason
from engine.grammar_check.pool import GrammarPool


class GrammarMetrics(Collector):
    """Counts since this gateway process started."""

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
