"""Collects measurements of every request and step of a simulation, compactly enough for millions of requests."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field

from engine.core.config import CoreConfig, LaneGoals
from engine.core.messages.requests import FinishReason, Lane, Request, TokenEvent
from engine.core.messages.step import StepPlan
from lab.devices.cost import StepWork
from lab.sim.fairness import ServiceGaps
from lab.traffic.histogram import Histogram

SAMPLE_S = 0.25
"""Minimum virtual seconds between two samples of the tenants' service."""
WARM_STEPS = 200
"""Number of first steps whose prediction errors do not count, because the step-time model starts untrained."""


def _seconds() -> array[float]:
    return array("d")


@dataclass(slots=True)
class Group:
    """Measurements in seconds of the requests of one tenant in one lane: TTFT of those with a token, end-to-end time of
    finished ones, TPOT of those with more tokens, and a histogram of all ITLs."""

    lane: Lane
    tenant: str
    goals: LaneGoals
    gaps: ServiceGaps
    """Service of each tenant of the lane, and the widest gap between two of them. All groups of a lane share this
    object."""
    ttft: array[float] = field(default_factory=_seconds)
    tpot: array[float] = field(default_factory=_seconds)
    e2e: array[float] = field(default_factory=_seconds)
    itl: Histogram = field(default_factory=Histogram)
    submitted: int = 0
    finished: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated: int = 0
    generated_in_time: int = 0
    """Tokens generated before the simulation's horizon, in virtual time. Throughput counts only these."""
    late_first: int = 0
    """Number of first tokens later than the lane's TTFT goal after the arrival."""
    late_gaps: int = 0
    """Number of gaps between tokens longer than the lane's ITL goal."""
    in_goals: int = 0
    """Finished requests whose TTFT and TPOT are within the lane's goals for the first and for further tokens."""
    refused: Counter[str] = field(default_factory=Counter)
    """Refused requests by error code."""


@dataclass(slots=True, eq=False)
class Track:
    """Measurements of one unfinished request of a simulation: its arrival and its first and last token in virtual
    seconds. The collector drops it when the request ends."""

    group: Group
    arrival: float
    prompt_tokens: int
    contended: bool
    """True means that `time_to_yield` measures this request: an interactive one that arrived while batch requests ran
    and no other interactive request waited for its first token, and whose adapter was not copied to the device
    since."""
    started: bool = False
    first: float = 0.0
    last: float = 0.0
    generated: int = 0


@dataclass(slots=True)
class StepStats:
    count: int = 0
    busy: float = 0.0
    """Total duration of all steps in seconds."""
    longest: float = 0.0
    durations: Histogram = field(default_factory=Histogram)
    prefill_tokens: int = 0
    errors: array[float] = field(default_factory=lambda: array("f"))
    """|actual - predicted| / actual of each step after the first `WARM_STEPS`."""
    peak_tokens: dict[Lane, int] = field(default_factory=lambda: dict.fromkeys(Lane, 0))
    """Most tokens that a lane had in one step: the context lengths of its decodes plus the lengths of its other
    chunks."""


class Collector:
    """Receives every request, step and event of one simulation, and accumulates the measurements for `make_report`."""

    def __init__(self, config: CoreConfig, horizon: float) -> None:
        self.groups: dict[tuple[Lane, str], Group] = {}
        self.gaps = {lane: ServiceGaps() for lane in Lane}
        self.steps = StepStats()
        self.time_to_yield = Histogram()
        self.unfinished: dict[str, Track] = {}
        self.outstanding: Counter[Lane] = Counter()
        self.running_batch = 0
        self.awaiting_first = 0
        """Number of interactive requests that wait for their first token."""
        self._goals: tuple[LaneGoals, LaneGoals] = config.goals
        self._horizon = horizon
        self._next_sample = 0.0

    def submit(self, request: Request) -> None:
        key = (request.lane, request.tenant)
        group = self.groups.get(key)
        if group is None:
            group = self.groups[key] = Group(*key, self._goals[request.lane], self.gaps[request.lane])
        group.submitted += 1
        interactive = request.lane is Lane.INTERACTIVE
        contended = interactive and self.running_batch > 0 and self.awaiting_first == 0
        self.awaiting_first += interactive
        self.unfinished[request.id] = Track(group, request.arrival, len(request.prompt_ids), contended)
        self.outstanding[request.lane] += 1
        group.gaps.submit(request.tenant)

    def step(self, plan: StepPlan, work: StepWork, seconds: float) -> None:
        """Record the measurements of a plan: its adapter loads, admissions and, if it has tokens, a step that took the
        device `seconds`. This method is a `StepObserver`, which the executor calls."""
        for load in plan.loads:
            if load.request_id in self.unfinished:
                self.unfinished[load.request_id].contended = False
        for admission in plan.admitted:
            track = self.unfinished[admission.request_id]
            if not track.started:
                self._start(track, admission.num_computed, plan.now)
        if not work.tokens:
            return
        steps = self.steps
        steps.count += 1
        steps.busy += seconds
        steps.longest = max(steps.longest, seconds)
        steps.durations.add(seconds)
        steps.prefill_tokens += work.prefill_tokens
        for lane, tokens in self._lane_tokens(plan).items():
            steps.peak_tokens[lane] = max(steps.peak_tokens[lane], tokens)
        if plan.predicted and steps.count > WARM_STEPS:
            steps.errors.append(abs(seconds - plan.predicted) / seconds)

    def take(self, events: list[TokenEvent], now: float) -> None:
        """Record the events that the engine returned at `now` (virtual seconds), and sample the service gaps between
        tenants every `SAMPLE_S` seconds."""
        for event in events:
            track, count = self.unfinished[event.request_id], len(event.tokens)
            if count:
                self._tokens(track, count, now)
            if event.finish_reason is not None:
                self._finish(event, track, now)
        if now >= self._next_sample:
            self._next_sample = now + SAMPLE_S
            for gaps in self.gaps.values():
                gaps.sample()

    def _lane_tokens(self, plan: StepPlan) -> dict[Lane, int]:
        """Return each lane's tokens in a step: the contexts that its decodes read plus the tokens of other chunks."""
        tokens = dict.fromkeys(Lane, 0)
        for request_id, start, count, _, _, proposals, _ in plan.chunks:
            is_decode = count == 1 + len(proposals)
            context = count * start + count * (count + 1) // 2
            tokens[self.unfinished[request_id].group.lane] += context if is_decode else count
        return tokens

    def _start(self, track: Track, num_cached: int, now: float) -> None:
        group = track.group
        track.started = True
        group.prompt_tokens += track.prompt_tokens
        group.cached_tokens += num_cached
        group.gaps.start(group.tenant, track.prompt_tokens - num_cached)
        self.running_batch += group.lane is Lane.BATCH
        if track.contended:
            self.time_to_yield.add(now - track.arrival)

    def _tokens(self, track: Track, count: int, now: float) -> None:
        group = track.group
        if track.generated == 0:
            track.first = now
            group.ttft.append(now - track.arrival)
            self.awaiting_first -= group.lane is Lane.INTERACTIVE
            group.late_first += now - track.arrival > group.goals.ttft_s
        else:
            gap = now - track.last
            group.itl.add(gap)
            group.late_gaps += gap > group.goals.itl_s
        track.last = now
        track.generated += count
        group.generated += count
        if now <= self._horizon:
            group.generated_in_time += count
        group.gaps.generate(group.tenant, count)

    def _finish(self, event: TokenEvent, track: Track, now: float) -> None:
        group = track.group
        del self.unfinished[event.request_id]
        self.outstanding[group.lane] -= 1
        self.awaiting_first -= track.generated == 0 and group.lane is Lane.INTERACTIVE
        self.running_batch -= track.started and group.lane is Lane.BATCH
        if not track.started:
            group.gaps.start(group.tenant, 0)
        if event.finish_reason is FinishReason.ERROR:
            group.refused[event.refusal.code.value if event.refusal else "error"] += 1
            return
        group.finished += 1
        group.e2e.append(now - track.arrival)
        tpot = (track.last - track.first) / max(1, track.generated - 1)
        if track.generated > 1:
            group.tpot.append(tpot)
        goals = group.goals
        group.in_goals += track.first - track.arrival <= goals.ttft_s and tpot <= goals.itl_s
