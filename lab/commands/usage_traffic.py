"""Figures of traffic from the gateways' usage books: rates, mean lengths, and popularity of adapters, day by day.

The books count per day, so that lengths of single requests and arrivals within a day are not in them. A request log
has both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import TypeVar

from gateway.api_schema.usage import UsageLine
from gateway.cli.http import admin
from gateway.core.usage import OTHERS, Counts
from lab.devices.capacity import Demand, serve
from lab.plans.advice import RANK, Advice, engines_needed, host_adapters
from lab.sim.run import Setup
from lab.traffic.analysis import fit_zipf

DAY_SECONDS = 86_400.0
K = TypeVar("K")
LIMITS = (
    "usage is counted by the day: a minute may be much busier than the mean of its day, and max_model_len and goals "
    "follow from the lengths of single requests, which a request log has"
)


@dataclass(frozen=True, slots=True)
class DayLine:
    """The usage of one tenant with one adapter, or base model, in one lane on one day (UTC)."""

    tenant: str
    adapter: str
    lane: str
    day: date
    counts: Counts


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """How requests are spread over adapters. Fields are those of `lab.traffic.analysis.Popularity`, but for days."""

    adapters: int
    share: float
    first: float
    zipf: float
    busiest_day: int
    """Number of different adapters on the day that had the most."""


@dataclass(frozen=True, slots=True)
class UsageTraffic:
    """Figures of the traffic that the books tell of. Lengths are means, in tokens; rates are requests a second."""

    requests: int
    seconds: float
    """Seconds from the beginning of the first day with usage to the end of the last one, or to now if that is today."""
    rate: float
    busiest: float
    """Mean requests per second of the day on which it was highest."""
    prompt: float
    output: float
    cached: float
    """Share of prompt tokens that were found in the prefix cache."""
    lanes: dict[str, int]
    """Lane -> requests."""
    tenants: dict[str, int]
    """Tenant -> requests, the busiest tenant first."""
    adapters: AdapterUse | None
    """None means that no request asked for an adapter."""

    def demand(self) -> Demand:
        """Return the average request for the capacity model, with an adapter if most requests ask for one."""
        rank = RANK if self.adapters and self.adapters.share > 0.5 else 0
        return Demand(self.prompt * (1 - self.cached), self.output, self.prompt + self.output / 2, rank)


def traffic_of(lines: Sequence[DayLine], base_models: Collection[str], now: datetime) -> UsageTraffic:
    """Return the figures of usage lines, of which those with a name in `base_models` ask for no adapter.

    Args:
        now: the present time, with a time zone.

    Raises ValueError if the lines count no request or no generated token.
    """
    total = sum((line.counts for line in lines), Counts())
    if not (total.requests and total.completion_tokens and total.prompt_tokens):
        raise ValueError("these days have no usage")
    days = _sums(lines, lambda line: line.day)
    seconds = {day: _passed(day, now) for day in days}
    whole = sum(_passed(min(days) + timedelta(later), now) for later in range((max(days) - min(days)).days + 1))
    return UsageTraffic(
        requests=total.requests,
        seconds=whole,
        rate=total.requests / whole,
        busiest=max(days[day] / seconds[day] for day in days),
        prompt=total.prompt_tokens / total.requests,
        output=total.completion_tokens / total.requests,
        cached=total.cached_tokens / total.prompt_tokens,
        lanes=dict(_sums(lines, lambda line: line.lane).most_common()),
        tenants=dict(_sums(lines, lambda line: line.tenant).most_common()),
        adapters=_adapters([line for line in lines if line.adapter not in base_models], total.requests),
    )


def read_usage(url: str, key: str, since: str, until: str) -> UsageTraffic:
    """Return the traffic that a running gateway has counted, from day `since` (empty: the month's first) to day `until`
    (empty: today). Ends the command with an error if the gateway refuses or does not answer. Raises ValueError if the
    days have no usage."""
    with admin(url, key) as client:
        base_models = {engine.base_model for engine in client.engines()}
        report = client.usage(since=since, until=until, group_by=["tenant", "adapter", "lane", "day"])
    return traffic_of([_line(line) for line in report.usage], base_models, datetime.now(UTC))


def advise(usage: UsageTraffic, setup: Setup) -> Advice:
    """Return the settings for an engine that follow from what the books tell, and what an operator should know."""
    device, used = setup.device, usage.adapters
    steady = serve(device, setup.core, usage.demand(), usage.busiest)
    settings = [host_adapters(device, used.busiest_day, "on one day")] if used else []
    notes = [LIMITS]
    if not steady.is_enough:
        notes.insert(0, engines_needed(device, steady, usage.busiest, "the busiest day"))
    return Advice(steady, settings, notes)


def _line(line: UsageLine) -> DayLine:
    counts = Counts(line.requests, line.prompt_tokens, line.cached_tokens, line.completion_tokens)
    return DayLine(str(line.tenant), str(line.adapter), str(line.lane), date.fromisoformat(str(line.day)), counts)


def _sums(lines: Sequence[DayLine], of: Callable[[DayLine], K]) -> Counter[K]:
    """Return the number of requests for each key that `of` returns for a line."""
    sums: Counter[K] = Counter()
    for line in lines:
        sums[of(line)] += line.counts.requests
    return sums


def _passed(day: date, now: datetime) -> float:
    """Return the seconds of a day (UTC) that have passed, at least one."""
    midnight = datetime(day.year, day.month, day.day, tzinfo=UTC)
    return min(DAY_SECONDS, max(1.0, (now - midnight).total_seconds()))


def _adapters(lines: Sequence[DayLine], requests: int) -> AdapterUse | None:
    """Return how the requests of `lines`, which all ask for an adapter, are spread over adapters; None if no adapter is
    known. `requests` is the number of all requests, with or without an adapter. Requests of the collecting row OTHERS
    count in shares only, because their adapters are not known."""
    counts = _sums(lines, lambda line: line.adapter)
    total = counts.total()
    counts.pop(OTHERS, None)
    if not counts.total():
        return None
    ordered = [count for _, count in counts.most_common() if count]
    by_day = Counter(day for _, day in {(line.adapter, line.day) for line in lines if line.adapter != OTHERS})
    return AdapterUse(
        adapters=len(ordered),
        share=total / requests,
        first=ordered[0] / total,
        zipf=fit_zipf(ordered),
        busiest_day=max(by_day.values()),
    )
