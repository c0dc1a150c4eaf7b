"""Measures a server at several request rates, and finds the highest one at which it meets its goals: the knee."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from lab.bench.document import Document, Settings
from lab.bench.measure import LaneResults
from lab.bench.run import Outcome
from lab.bench.spec import SpecError

FORMAT = "loralane-bench-sweep/1"
POINT_SECONDS, MIN_REQUESTS = 30.0, 20
"""Seconds for which requests arrive at each rate if the plan has no duration, and minimum number of requests of the
first lane at each rate if the lane has no `n`."""
MOST_STEPS = 12
"""Maximum number of times that the search doubles or halves the rate."""
PRECISION = 1.1
"""The search ends when the lowest rate that misses the goals is at most this many times the highest that meets them."""
Measure = Callable[[Settings, str], Outcome]
"""Makes a run, given its settings and the label of its progress bars."""


@dataclass(frozen=True, slots=True)
class Point:
    """A run at one rate of the first lane, in requests per second."""

    rate: float
    holds: bool | None
    """True means that the first lane met its goals, None that it has none."""
    document: Document

    @property
    def lane(self) -> LaneResults:
        return self.document.lanes[0]


@dataclass(frozen=True, slots=True)
class Sweep:
    """Result of a sweep: `points` are its runs in order of their rates, and `share` is the share of requests that have
    to meet the goals, 0 to 1."""

    format: str
    share: float
    knee: float | None
    """Highest rate, in requests per second, for which it and all lower measured rates met the goals. None means that
    the lowest rate was too high, or that there are no goals."""
    points: tuple[Point, ...]

    def write(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1)


class Sweeper:
    """Measures a server at one request rate after another, by the first lane of `settings`, with new prompts for every
    run; `on_point` gets the results of `measure`. Raises SpecError if that lane replays a trace or the share is bad."""

    def __init__(
        self,
        settings: Settings,
        measure: Measure,
        share: float,
        on_point: Callable[[Point], None] = lambda point: None,
    ) -> None:
        if settings.plan.trace is not None:
            raise SpecError("a sweep makes arrivals of its own: give the trace as --dataset, which takes its lengths")
        if not 0 < share <= 1:
            raise SpecError(f"the share that has to meet the goals must be above 0 and at most 1, not {share:g}")
        self._settings = settings
        self._measure = measure
        self._share = share
        self._on_point = on_point
        self._points: dict[float, Point] = {}
        self.outcomes: list[Outcome] = []

    def holds(self, rate: float) -> bool:
        """Measure a rate, and return whether the first lane met its goals (False without goals)."""
        outcome = self._measure(at_rate(self._settings, rate, len(self._points)), f"{rate:.3g}/s ")
        goodput = outcome.document.lanes[0].goodput
        holds = None if goodput is None else goodput.attainment >= self._share
        self._points[rate] = point = Point(rate, holds, outcome.document)
        self.outcomes.append(outcome)
        self._on_point(point)
        return bool(holds)

    def result(self) -> Sweep:
        points = tuple(self._points[rate] for rate in sorted(self._points))
        return Sweep(FORMAT, self._share, knee_of(points), points)


def at_rate(settings: Settings, rate: float, index: int) -> Settings:
    """Return the settings of run number `index` of a sweep, with the first lane at `rate`. Lanes with a rate and no `n`
    get as many requests as arrive in the plan's duration, the first at least MIN_REQUESTS."""
    plan = settings.plan
    seconds = plan.duration or POINT_SECONDS
    lanes = [replace(plan.lanes[0], rate=rate), *plan.lanes[1:]]
    counted = [lane if lane.n or not lane.rate else replace(lane, n=math.ceil(lane.rate * seconds)) for lane in lanes]
    if not lanes[0].n:
        counted[0] = replace(counted[0], n=max(MIN_REQUESTS, counted[0].n or 0))
    plan = replace(plan, lanes=tuple(counted), duration=None, prompts=plan.prompts + index)
    return replace(settings, plan=plan, warmup=0 if index else settings.warmup)


def find_knee(holds: Callable[[float], bool], first: float, precision: float = PRECISION) -> None:
    """Search for the highest rate that `holds`: double (or halve) from `first` on, then bisect by geometric means until
    the ratio of the ends is at most `precision`."""
    meets = holds(first)
    low, high = first, first
    for _ in range(MOST_STEPS):
        low, high = (high, 2 * high) if meets else (low / 2, low)
        if holds(high if meets else low) is not meets:
            break
    else:
        return
    while high / low > precision:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)


def knee_of(points: Sequence[Point]) -> float | None:
    """Return the highest rate for which it and all lower rates of `points` met the goals. `points` are in order of
    rate. None means that the lowest rate missed the goals."""
    knee = None
    for point in points:
        if not point.holds:
            break
        knee = point.rate
    return knee


def parse_rates(text: str) -> list[float]:
    """Parse `1,2,4.5` into rates, without repetitions. Raises SpecError if one is no positive number."""
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < math.inf for rate in rates):
        raise SpecError(f"rates are positive numbers with commas between them, such as 1,2,4, not {text!r}")
    return list(dict.fromkeys(rates))
