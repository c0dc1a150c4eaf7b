"""What a trace of requests looks like: arrivals, lengths, shared prefixes, adapters, lanes and tenants."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lab.traffic.histogram import percentile
from lab.traffic.reuse import Reuse, measure_reuse
from lab.traffic.traces import Trace

MINUTE = 60.0
SHORTEST = 1.0
"""Minimum length in seconds of a trace for which arrival rates are computed."""
WINDOWS = (60.0, 600.0)
"""Windows in seconds for which an adapter that was asked for counts as part of the working set."""
MOST_ZIPF = 10.0
"""Upper bound of a fitted Zipf exponent."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, percentiles and maximum of the lengths of a trace's requests, in tokens. `bins` counts the requests by the
    smallest power of two that is not below their length."""

    mean: float
    p50: int
    p90: int
    p99: int
    most: int
    bins: dict[int, int]

    @classmethod
    def of(cls, lengths: Iterable[int]) -> Spread:
        """Return the mean, percentiles, maximum and bins of `lengths`, in tokens. Raises ValueError if there are
        none."""
        ordered = sorted(lengths)
        p50, p90, p99 = (int(percentile(ordered, share) or 0) for share in (0.5, 0.9, 0.99))
        bins = Counter(1 << (length - 1).bit_length() for length in ordered)
        return cls(statistics.fmean(ordered), p50, p90, p99, ordered[-1], dict(sorted(bins.items())))


@dataclass(frozen=True, slots=True)
class Popularity:
    """Statistics of how a trace's requests are spread over adapters: shares, a fitted Zipf exponent and working
    sets."""

    adapters: int
    share: float
    """Share of all requests that ask for an adapter."""
    first: float
    """Share of these requests that ask for the most popular adapter."""
    tenth: float
    """Share of these requests that ask for one of the most popular tenth of the adapters."""
    zipf: float
    """Exponent of the Zipf law that is most likely to have drawn the adapters: 0 means that all are equally popular."""
    working: dict[float, int]
    """Length of a window in seconds (see `WINDOWS`) -> size of the largest working set: the most distinct adapters that
    requests within any window of that length ask for."""


@dataclass(frozen=True, slots=True)
class Analysis:
    requests: int
    seconds: float
    """Seconds from the first arrival to the last."""
    rate: float | None
    """Mean arrivals a second. None means that all arrive within `SHORTEST`."""
    busiest: float | None
    """Arrivals a second of the busiest minute. None means that all arrive within `SHORTEST`."""
    cv: float | None
    """Coefficient of variation of the gaps between arrivals: 1 is a Poisson process, more is bursty."""
    prompt: Spread
    output: Spread
    whole: Spread
    """Lengths of prompt and answer together."""
    reuse: Reuse
    lanes: dict[str, int]
    """Lane -> requests."""
    tenants: dict[str, int]
    """Tenant -> requests, the busiest tenant first."""
    popularity: Popularity | None
    """None means that no request asks for an adapter."""


def analyze(trace: Trace) -> Analysis:
    """Return the arrival rates, lengths, prefix reuse and adapter popularity of a trace. Raises ValueError if it has no
    requests."""
    if not trace:
        raise ValueError("the trace has no requests")
    times = [arrival.time for arrival in trace]
    seconds = times[-1] - times[0]
    return Analysis(
        requests=len(trace),
        seconds=seconds,
        rate=(len(trace) - 1) / seconds if seconds >= SHORTEST else None,
        busiest=_busiest(times) if seconds >= SHORTEST else None,
        cv=_variation([after - before for before, after in pairwise(times)]),
        prompt=Spread.of(arrival.prompt_tokens for arrival in trace),
        output=Spread.of(arrival.output_tokens for arrival in trace),
        whole=Spread.of(arrival.prompt_tokens + arrival.output_tokens for arrival in trace),
        reuse=measure_reuse(trace),
        lanes=dict(Counter(arrival.lane.name.lower() for arrival in trace).most_common()),
        tenants=dict(Counter(arrival.tenant for arrival in trace).most_common()),
        popularity=_popularity([(arrival.time, arrival.adapter) for arrival in trace]),
    )


def _busiest(times: Sequence[float]) -> float:
    """Return the most arrivals a second within any minute, or within the whole trace if it is shorter. `times`
    ascend; of a window's two ends, only the later one belongs to it."""
    window = min(MINUTE, times[-1] - times[0])
    most = first = 0
    for last, time in enumerate(times):
        while times[first] <= time - window:
            first += 1
        most = max(most, last - first + 1)
    return most / window


def _variation(gaps: Sequence[float]) -> float | None:
    """Return the coefficient of variation of the gaps between arrivals. None means that there are fewer than two gaps,
    or that all are 0."""
    mean = statistics.fmean(gaps) if len(gaps) > 1 else 0.0
    return statistics.pstdev(gaps) / mean if mean else None


def _popularity(asked: Sequence[tuple[float, int]]) -> Popularity | None:
    """Return the statistics of how requests, each given as (time, index of its adapter or -1 for the base model), are
    spread over adapters. None means that no request asks for an adapter."""
    named = [(time, adapter) for time, adapter in asked if adapter >= 0]
    if not named:
        return None
    counts = sorted(Counter(adapter for _, adapter in named).values(), reverse=True)
    tenth = sum(counts[: math.ceil(len(counts) / 10)])
    return Popularity(
        adapters=len(counts),
        share=len(named) / len(asked),
        first=counts[0] / len(named),
        tenth=tenth / len(named),
        zipf=fit_zipf(counts),
        working={window: _working_set(named, window) for window in WINDOWS},
    )


def _working_set(asked: Sequence[tuple[float, int]], window: float) -> int:
    """Return the largest number of distinct adapters that requests within any `window` seconds ask for. `asked` has the
    (time, adapter) of each request, in order of time."""
    inside: Counter[int] = Counter()
    most = first = 0
    for time, adapter in asked:
        inside[adapter] += 1
        while asked[first][0] < time - window:
            inside[asked[first][1]] -= 1
            if not inside[asked[first][1]]:
                del inside[asked[first][1]]
            first += 1
        most = max(most, len(inside))
    return most


def fit_zipf(counts: Sequence[int]) -> float:
    """Return the maximum-likelihood exponent s, from 0 to `MOST_ZIPF`, of a law k^-s for `counts`, the requests of each
    adapter in descending order. A single count has exponent 0."""
    logs = [math.log(rank) for rank in range(1, len(counts) + 1)]
    seen = sum(count * log for count, log in zip(counts, logs, strict=True)) / sum(counts)

    def expected(exponent: float) -> float:
        weights = [math.exp(-exponent * log) for log in logs]
        return sum(weight * log for weight, log in zip(weights, logs, strict=True)) / sum(weights)

    low, high = 0.0, MOST_ZIPF
    if len(counts) == 1 or expected(low) <= seen:
        return 0.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if expected(middle) > seen else (low, middle)
    return low
