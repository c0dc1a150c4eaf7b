"""Latency percentiles by base model and lane over the last minutes, computed from the histograms that /metrics already
has."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from prometheus_client.core import Metric

from engine.core.messages.requests import Lane
from gateway.api_schema.traffic import Percentiles
from gateway.core.lanes import lane_name
from gateway.observe.vllm_requests import MODEL

TTFT, ITL = "loralane_time_to_first_token_seconds", "loralane_inter_token_latency_seconds"

WINDOW_SECONDS = 300.0
SAMPLE_SECONDS = 10.0
"""Minimum seconds between two readings of the histograms that `LatencyWindow` remembers. A window may be longer than
WINDOW_SECONDS by at most this time."""

Counts = Mapping[tuple[str, str, str], Sequence[tuple[float, float]]]
"""(Histogram, base model, lane) -> rows of (upper bound in seconds, number of observations up to that bound), the last
bound infinite."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Latencies of the requests that the metrics counted in one window, as `LatencyWindow.read` returns them."""

    window_seconds: float
    counts: Counts
    """Cumulative histogram counts of the observations in the window alone."""

    def get(self, histogram: str, model: str, lane: Lane) -> Percentiles:
        rows = self.counts.get((histogram, model, lane_name(lane)), ())
        if not _observed(rows):
            return Percentiles()
        p50, p95, p99 = (percentile(rows, share) for share in (0.5, 0.95, 0.99))
        return Percentiles(p50, p95, p99, round(rows[-1][1]))

    def at(self, histogram: str, model: str, lane: Lane, share: float) -> float | None:
        """Return the percentile at `share` (0 to 1) of a lane's `histogram` (TTFT, ITL) in seconds; None without
        data."""
        rows = self.counts.get((histogram, model, lane_name(lane)), ())
        return percentile(rows, share) if _observed(rows) else None


class LatencyWindow:
    """Computes latencies over about the last `WINDOW_SECONDS` as differences from remembered counts. Counts are
    remembered only when `read` is called: a read after a long pause covers everything since the last remembered
    count."""

    def __init__(self, collect: Callable[[], Iterable[Metric]], clock: Callable[[], float] = time.monotonic) -> None:
        """`collect` returns metrics that include the histograms TTFT and ITL by base model and lane. `clock` returns
        seconds."""
        self._collect = collect
        self._clock = clock
        self._samples: deque[tuple[float, Counts]] = deque([(clock(), {})])

    def read(self) -> Latency:
        now, counts = self._clock(), self._count()
        while len(self._samples) > 1 and self._samples[1][0] <= now - WINDOW_SECONDS:
            self._samples.popleft()
        since, before = self._samples[0]
        if now - self._samples[-1][0] >= SAMPLE_SECONDS:
            self._samples.append((now, counts))
        return Latency(now - since, {key: _grown(rows, before.get(key, ())) for key, rows in counts.items()})

    def _count(self) -> Counts:
        samples: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
        for family in self._collect():
            for sample in family.samples if family.name in (TTFT, ITL) else ():
                if sample.name.endswith("_bucket"):
                    row = float(sample.labels["le"]), sample.value
                    key = family.name, sample.labels[MODEL], sample.labels["lane"]
                    samples.setdefault(key, []).append(row)
        return {key: sorted(rows) for key, rows in samples.items()}


def _grown(now: Sequence[tuple[float, float]], before: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the cumulative counts of what one histogram observed between two readings: those of `now` minus those of
    `before` at the same bounds."""
    earlier = dict(before)
    return [(bound, count - earlier.get(bound, 0.0)) for bound, count in now]


def _observed(rows: Sequence[tuple[float, float]]) -> bool:
    return bool(rows) and rows[-1][1] > 0


def percentile(rows: Sequence[tuple[float, float]], share: float) -> float:
    """Return the value in seconds below which a share (0 to 1) of the observations lies, interpolated within its
    bucket. `rows` are as in `Counts` and not empty. A value beyond the last finite bound is returned as that bound."""
    wanted = share * rows[-1][1]
    low = below = 0.0
    for bound, count in rows:
        if count >= wanted:
            return low if bound == inf else low + (bound - low) * (wanted - below) / max(count - below, 1e-9)
        low, below = bound, count
    return low
