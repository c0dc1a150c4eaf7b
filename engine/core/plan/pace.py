"""Decides when the next step is planned, where steps are planned ahead of the device: as late as the device allows.

A request that arrives after a step was planned has to wait for a later one. The host therefore rests until `lead`
seconds before the predicted end of the step under way. Each step shows afterwards which lead would have been just
enough: the time that the host needed until the step's first work reached the device, and the error of the prediction.
The error is kept as a share of the predicted seconds, so that long steps get a longer lead than short ones. The lead is
the second largest that any of the last `NEEDS_KEPT` steps would have needed. If the need of the next step is as likely
to have any rank among them as any other, it exceeds the lead in 2 of `NEEDS_KEPT` + 1 steps, whatever its distribution;
the rest of the promised hundredth is a reserve for needs that grow. Two late steps are enough to learn of a change for
the worse, and a single stall of the host changes nothing.

A step may be late because launching the step before it took too long. Then the last step before them for which the host
rested needed a longer lead, and the longest possible one if the device had to wait for the launches themselves. If the
step would have been late even if the host had never rested, the host is slower than the device: no lead could have
helped, and none is learned from it. `python -m benchmarks.pace` prints simulated figures.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import nlargest
from math import inf

from engine.core.messages.step import Launch
from engine.core.state.engine_state import EngineState

FIRST_LEAD_S, FIRST_STEPS = 0.005, 64
"""How many seconds before the predicted end of the step under way the next one is planned (the lead), until
`FIRST_STEPS` steps have shown what lead they need. It is rather too long, so that a request that just missed a step is
no worse off than without a rest."""
NEEDS_KEPT = 512
NEEDS_EXCEEDED = 2
"""The lead (see `Pace.lead`) is chosen such that fewer than this many of the last `NEEDS_KEPT` steps needed a longer
one."""
LEAST_REST = 0.2
"""Minimum rest of the host as a share of the predicted duration of the step under way. The host skips a shorter rest,
which would let in few requests and still make steps late, and plans the next step at once."""
LAUNCH_BOUND_S = 0.0002
"""A step that ends within this many seconds after the host has launched all of it made the device wait for launches."""
LONGEST_REST_S = 0.25
"""Maximum rest in seconds: how long a caller that stops the engine, or a device after a far too long prediction, may
wait."""


@dataclass(slots=True)
class Need:
    """Record of one past step, from which the lead of later steps is computed: when the step should have been planned
    to reach the device just in time, and when it was to be planned.

    Attributes:
        host: seconds, before the device ended the step under way, at which it would have had to be planned.
        error: seconds by which the step under way ended earlier than predicted, as a share of the predicted seconds.
        given: seconds before that end at which it was to be planned.
        possible: seconds before that end at which it could have been planned without a rest.
    """

    host: float
    error: float
    given: float = 0.0
    possible: float = 0.0

    def lengthen(self, seconds: float) -> None:
        """Raise `host`, the seconds before the end of the step under way at which this step should have been planned,
        in hindsight: to `seconds` more than it was given, but to no more than was possible without a rest. `Pace` calls
        this when a later step is late because this one was planned too late."""
        self.host = max(self.host, min(self.given + seconds, self.possible))


class Needs:
    """The `Need` of each of the last `NEEDS_KEPT` steps, from which the lead of the next step is computed."""

    def __init__(self) -> None:
        self._recent: deque[Need] = deque(maxlen=NEEDS_KEPT)

    def lead(self, predicted: float) -> float:
        """Return how many seconds before the end of the step under way, which is predicted to last `predicted` seconds,
        the host shall begin to plan the next one: the second longest lead that any recorded step needed, or
        `FIRST_LEAD_S` until `FIRST_STEPS` steps are recorded."""
        if len(self._recent) < FIRST_STEPS:
            return FIRST_LEAD_S
        return nlargest(NEEDS_EXCEEDED, [need.host + need.error * predicted for need in self._recent])[-1]

    def add(self, need: Need) -> None:
        self._recent.append(need)


@dataclass(frozen=True, slots=True)
class _Rest:
    """The time for which the host rested before it planned a step. Times are in seconds on the engine's clock.

    Attributes:
        begun: when the host could have planned the step.
        planned: when it was to plan the step.
        ended: when it began to plan the step.
        end: predicted end of the step under way.
        predicted: predicted duration of the step under way, in seconds.
    """

    begun: float
    planned: float
    ended: float
    end: float
    predicted: float


@dataclass(frozen=True, slots=True)
class _Submitted:
    """What `Pace` notes of a step under way. Times are in seconds on the engine's clock.

    Attributes:
        begun: when its submission began.
        reached: when its first work reached the device.
        returned: when all of it was launched.
        late: whether the device had run out of work when its first work reached it.
        rest: the rest before it was planned. None means that nothing can be learned from the step: it, or the one
            before it, computes nothing, or the one before had no predicted end.
    """

    begun: float
    reached: float
    returned: float
    late: bool
    rest: _Rest | None


class Pace:
    """Delays the planning of each step that is planned ahead of the device, so that requests can still join it, and
    adapts the delay such that hardly any step reaches the device late. An engine has one Pace. For each step, the
    engine calls `rest` before it plans the step, `submitted` after it has submitted it, and `ended` once its result is
    there.

    Attributes:
        lead: seconds before the predicted end of the step under way at which a step is to be planned, as last computed.
    """

    def __init__(self, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._clock, self._sleep = clock, sleep
        self.lead = FIRST_LEAD_S
        self._needs = Needs()
        self._under_way: deque[_Submitted] = deque()
        self._device_ended = 0.0
        """When the device finished the last step that was collected, in seconds on the engine's clock."""
        self._rest: _Rest | None = None
        self._rested = Need(0.0, 0.0)
        """Need of the last step for which the host rested."""
        self._delay = 0.0
        """By how many seconds earlier the host would have come to plan the next step, had it never rested."""

    def rest(self, state: EngineState) -> float:
        """Delay the planning of the next step, so that more requests can join it: sleep until `lead` seconds before the
        predicted end of the step under way, but at most `LONGEST_REST_S` seconds. Do not sleep if no step with a
        prediction is under way, or for less than the share `LEAST_REST` of the prediction. Return the clock's time
        afterwards, in seconds."""
        now = self._clock()
        predicted = state.steps.under_way[0].plan.forecast.seconds if state.steps.under_way else 0.0
        self._rest = None
        if not predicted or not self._under_way:
            return now
        end = self._begun_by_device(self._under_way[0]) + predicted
        wait, ended = self._wait(end - now, predicted), now
        if wait:
            self._sleep(max(0.0, wait - (self._clock() - now)))  # computing the lead was part of the rest
            ended = self._clock()
        self._rest = _Rest(now, now + wait, ended, end, predicted)
        return ended

    def _wait(self, left: float, predicted: float) -> float:
        """Return for how many seconds, at most `LONGEST_REST_S`, the host shall rest before it plans the next step,
        while a step of `predicted` seconds is under way that ends in `left` seconds; 0 if the rest would be shorter
        than the share `LEAST_REST` of `predicted`. A host that is too late for a rest does not spend time on computing
        the lead."""
        least = LEAST_REST * predicted
        if left < least:
            return 0.0
        self.lead = self._needs.lead(predicted)
        wait = left - self.lead
        return min(wait, LONGEST_REST_S) if wait >= least else 0.0

    def submitted(self, begun: float, launch: Launch, *, computes: bool) -> None:
        """Record the times of a step's submission, from which `ended` learns when steps must be planned. The call of
        the executor's `submit` began at `begun`, in seconds on the engine's clock, and has just returned `launch`.
        `computes` tells whether the step has anything to compute."""
        returned = self._clock()
        reached = returned if launch.reached_s is None else begun + launch.reached_s
        self._under_way.append(_Submitted(begun, reached, returned, launch.late, self._rest if computes else None))

    def ended(self, now: float, seconds: float | None) -> bool:
        """Note that the result of the oldest step under way was collected at `now`, and that the device took `seconds`
        for it (None: it computed while the host waited). Learn from the step after it, which the device begins now, how
        early steps must be planned. Return whether that step was late, and would have been late even if the host had
        never rested."""
        step = self._under_way.popleft()
        following = self._under_way[0] if self._under_way else None
        end = now if seconds is None else min(now, self._begun_by_device(step) + seconds)
        if following is not None:  # its submission has seen whether this step was finished
            end = min(end, following.reached) if following.late else max(end, following.reached)
        self._device_ended = end
        if following is None or following.rest is None:
            self._delay = 0.0
            return False
        return self._learn(following, following.rest, end, launch_bound=end - step.returned < LAUNCH_BOUND_S)

    def _begun_by_device(self, step: _Submitted) -> float:
        """Return when the device began the oldest step under way: when it had finished the step before, or when the
        step was submitted, if that was later."""
        return max(step.begun, self._device_ended)

    def _learn(self, step: _Submitted, rest: _Rest, end: float, *, launch_bound: bool) -> bool:
        """Record how early a step, submitted while the device ended the step before it at `end`, should have been
        planned. `launch_bound` tells whether the device had to wait for launches of the step before. Return whether the
        step was late, and would have been late even if the host had never rested."""
        late, rested = step.reached - end, rest.ended - rest.begun
        delay = self._delay + rested
        self._delay = _passed_on(delay, late=late, busy=step.returned - end)
        if step.late and late >= delay:
            return True
        if delay > rested:  # launching the step before it took longer than the device did for the one before that
            self._rested.lengthen(inf if launch_bound else late - rested)
        possible = end - rest.begun
        host = min(step.reached - rest.planned, possible)
        need = Need(host, (rest.end - end) / rest.predicted, end - rest.planned, possible)
        self._needs.add(need)
        if rested:
            self._rested = need
        return False


def _passed_on(delay: float, *, late: float, busy: float) -> float:
    """Return by how many seconds the host would have come earlier to plan the next step, had it come `delay` seconds
    earlier to plan this one, which reached the device `late` seconds after it had ended the step before.

    The host was launching this step until `busy` seconds after that end, and may plan the next one only after it: only
    so much of the delay counts. The part of it by which the step was late delays the device as well, so that the next
    step has as much more time."""
    kept_from_host = min(delay, busy)
    shifted_device = min(delay, max(0.0, late))
    return max(0.0, kept_from_host - shifted_device)
