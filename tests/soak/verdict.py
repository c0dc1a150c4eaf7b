"""Judges the readings: some series must not grow, some must be zero at rest, and some must be constant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import sqrt
from statistics import median

from tests.soak.gauges import PAGES, Reading

MEMORY_BOUND = 1.0
"""Largest growth of a memory series, in MiB per minute."""
FLAT_SHARE, FLAT_COUNT = 0.02, 2.0
"""Largest growth of a count over the run: this fraction of its median plus this number."""
NOTHING_AT_REST = ("kv pages", "running", "waiting", "leases", "undelivered tokens")
FLAT = ("descriptors", "threads", "tasks", "keys", "adapters known")
MEMORY = ("heap MiB", "redis MiB")
"""Memory series to judge. PSS is left out: it changes when other processes that share libraries start or exit."""
CONFIDENCE = 1.645
"""Standard deviations of a one-sided confidence of 95 %."""
FEWEST = 4
"""Smallest number of readings from which a trend is computed."""

Series = Sequence[tuple[float, float]]
"""Readings of one series: (seconds, value)."""


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    at_first: float
    at_last: float
    slope: float
    """Growth per minute."""
    bound: str
    is_met: bool


def slope(series: Series) -> float:
    """Return the growth per minute by the Theil-Sen estimator, which is robust against outliers: the median of the
    slopes between all pairs of readings."""
    return median(_slopes(series))


def least_slope(series: Series) -> float:
    """Return the lower bound of the growth per minute at a confidence of 95 % (Sen's interval, from the variance of
    Kendall's tau). If it is below 0, the growth may be noise."""
    slopes, n = sorted(_slopes(series)), len(series)
    spread = CONFIDENCE * sqrt(n * (n - 1) * (2 * n + 5) / 18)
    return slopes[max(0, int((len(slopes) - spread) / 2))]


def _slopes(series: Series) -> list[float]:
    return [60 * (y - x) / (t - s) for (s, x), (t, y) in combinations(series, 2)]


def judge(readings: Sequence[tuple[float, Reading]]) -> list[Finding]:
    """Judge the readings at rest, (seconds, reading) without those of the warm-up, and return a finding for each series
    that has a rule. Raises ValueError if there are fewer than FEWEST readings."""
    if len(readings) < FEWEST:
        raise ValueError(f"{len(readings)} readings at rest after the warm-up are too few to tell a trend: run longer")
    named = {name: [(at, reading[name]) for at, reading in readings if name in reading] for name in readings[0][1]}
    findings = [_memory(name, series) for name, series in named.items() if name.endswith(MEMORY)]
    findings += [_count(name, series) for name, series in named.items() if name.endswith(FLAT)]
    findings += [_nothing(name, named[name]) for name in NOTHING_AT_REST]
    pages = [(at, sum(reading[name] for name in PAGES)) for at, reading in readings]
    return [*findings, _same("processes", named["processes"]), _same("pages in all", pages)]


def _memory(name: str, series: Series) -> Finding:
    found = slope(series)
    is_met = found < MEMORY_BOUND or least_slope(series) <= 0
    return Finding(name, series[0][1], series[-1][1], found, f"< {MEMORY_BOUND:g} a minute", is_met)


def _count(name: str, series: Series) -> Finding:
    found = slope(series)
    growth = found * (series[-1][0] - series[0][0]) / 60
    bound = FLAT_COUNT + FLAT_SHARE * median(value for _, value in series)
    return Finding(name, series[0][1], series[-1][1], found, f"+{bound:.0f} in all", growth <= bound)


def _nothing(name: str, series: Series) -> Finding:
    worst = max(value for _, value in series)
    return Finding(name, series[0][1], series[-1][1], slope(series), "0 at rest", worst == 0)


def _same(name: str, series: Series) -> Finding:
    """Require a constant series. For pages this means that none is lost and none is counted twice."""
    same = len({value for _, value in series}) == 1
    return Finding(name, series[0][1], series[-1][1], slope(series), "the same", same)


def unexpected(outcomes: Mapping[str, int]) -> list[str]:
    """Return the outcomes that are marked as unexpected, sorted."""
    return sorted(word for word in outcomes if ": unexpected" in word)
