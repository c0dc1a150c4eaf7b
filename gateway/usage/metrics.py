"""Exports metrics of tokens that are missing in the usage books: those to be counted later, and lost ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class Uncounted(Protocol):
    """Numbers of used tokens that are not in the usage books."""

    @property
    def undelivered_tokens(self) -> int: ...

    @property
    def lost_tokens(self) -> int: ...


class UsageMetrics(Collector):
    def __init__(self, uncounted: Uncounted) -> None:
        self._uncounted = uncounted

    def collect(self) -> Iterable[Metric]:
        waiting, lost = self._uncounted.undelivered_tokens, self._uncounted.lost_tokens
        yield GaugeMetricFamily(
            "loralane_usage_undelivered_tokens",
            "Tokens used while Redis was unreachable that are still to be recorded.",
            waiting,
        )
        yield CounterMetricFamily("loralane_usage_lost_tokens", "Tokens used whose record was lost.", lost)
