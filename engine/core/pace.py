"""Decides when the next step is planned, where steps are planned ahead of the device: as late as the device allows.

A request that arrives after a step was planned has to wait for a later one. The host therefore rests until `lead`
seconds before the predicted end of the step under way. Each step shows afterwards which lead it would have needed: the
lead it was planned with, less the time by which its first work reached the device before the device ran out of work
(more, if it came later). That covers waking up, planning, launching and the error of the prediction, none of which has
to be known. The lead is the second largest of the last `NEEDS_KEPT` needs. If the need of the next step is as likely to
have any rank among them as any other, it exceeds the lead in 2 of `NEEDS_KEPT` + 1 steps, whatever its distribution;
the rest of the promised hundredth is a reserve for needs that grow. Two late steps are enough to learn of a change for
the worse, and a single stall of the host changes nothing.

A step may be late though the host did not rest, because launching the step before it took too long. The last step
before them that was planned with time to spare then needed as much more. Simulated figures are in
docs/architecture.md, from `python -m benchmarks.pace`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.core.state import EngineState
from engine.core.types import Launch

FIRST_LEAD_S = 0.005
"""Initial lead in seconds, rather too long: a request that just missed a step is then no worse off than without a
rest."""
NEEDS_KEPT = 512
NEEDS_EXCEEDED = 2
"""The lead is exceeded by fewer than this many of the last `NEEDS_KEPT` needs."""
LONGEST_REST_S = 0.25
"""Maximum rest in seconds: how long a caller that stops the engine, or a device after a far too long prediction, may
wait."""


@dataclass(frozen=True, slots=True)
class _Lead:
    """The lead with which a step was planned (`given`), and what it would have been without a rest (`possible`), both
    in seconds before the predicted end of the step before it."""

    given: float
    possible: float


@dataclass(frozen=True, slots=True)
class _Submitted:
    """A step that is under way. Times are in seconds on the engine's clock.

    Attributes:
        begun: when its submission began.
        reached: when its first work reached the device.
        late: whether the device had run out of work by then.
        lead: None means that the lead says nothing: the step computes nothing, or the one before it did not, or had no
            predicted end.
    """

    begun: float
    reached: float
    late: bool
    lead: _Lead | None


class Needs:
    """The last `NEEDS_KEPT` leads that steps have needed, in seconds, at first as if there had been `NEEDS_EXCEEDED`
    steps that needed `FIRST_LEAD_S`."""

    def __init__(self) -> None:
        self._recent = deque([FIRST_LEAD_S] * NEEDS_EXCEEDED)
        self._ordered = list(self._recent)

    @property
    def lead(self) -> float:
        return self._ordered[-NEEDS_EXCEEDED]

    def add(self, need: float) -> None:
        self._recent.append(need)
        insort(self._ordered, need)
        if len(self._recent) > NEEDS_KEPT:
            del self._ordered[bisect_left(self._ordered, self._recent.popleft())]


class Pace:
    """Delays each step that is planned ahead, and adapts by how much. An engine has one Pace. For each step, the engine
    calls `rest` before it plans the step, `submitted` after it has submitted it, and `ended` once its result is there.
    """

    def __init__(self, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._clock, self._sleep = clock, sleep
        self._needs = Needs()
        self._under_way: deque[_Submitted] = deque()
        self._device_ended = 0.0
        """When the device finished the last step that was collected, in seconds on the engine's clock."""
        self._planned: _Lead | None = None
        self._spare = _Lead(0.0, 0.0)
        """Lead of the last step that could have been in time with a longer one."""

    @property
    def lead(self) -> float:
        """Number of seconds before the predicted end of a step at which the next step is planned."""
        return self._needs.lead

    def rest(self, state: EngineState) -> float:
        """Sleep until `lead` seconds before the predicted end of the step under way, if any, but at most
        `LONGEST_REST_S` seconds, and return the clock's time afterwards, in seconds."""
        now = self._clock()
        predicted = state.under_way[0].plan.predicted if state.under_way else 0.0
        self._planned = None
        if not predicted or not self._under_way:
            return now
        possible = self._begun_by_device(self._under_way[0]) + predicted - now
        wait = min(possible - self.lead, LONGEST_REST_S)
        self._planned = _Lead(possible - max(0.0, wait), possible)
        if wait <= 0:
            return now
        self._sleep(wait)
        return self._clock()

    def submitted(self, begun: float, launch: Launch, *, computes: bool) -> None:
        """Note that a step was submitted by a call that began at `begun`, in seconds on the engine's clock, and has
        just returned. `computes` tells whether the step has anything to compute."""
        reached = self._clock() if launch.reached_s is None else begun + launch.reached_s
        self._under_way.append(_Submitted(begun, reached, launch.late, self._planned if computes else None))

    def ended(self, now: float, seconds: float | None) -> None:
        """Note that the result of the oldest step under way was collected at `now`, and that the device took `seconds`
        for it (None: it computed while the host waited). Learn from the step after it, which the device begins now."""
        step = self._under_way.popleft()
        following = self._under_way[0] if self._under_way else None
        end = now if seconds is None else min(now, self._begun_by_device(step) + seconds)
        if following is not None:  # its submission has seen whether this step was finished
            end = min(end, following.reached) if following.late else max(end, following.reached)
        self._device_ended = end
        if following is not None and following.lead is not None:
            self._learn(following.lead, following.reached - end)

    def _begun_by_device(self, step: _Submitted) -> float:
        """Return when the device began the oldest step under way: when it had finished the step before, or when the
        step was submitted, if that was later."""
        return max(step.begun, self._device_ended)

    def _learn(self, lead: _Lead, lateness: float) -> None:
        """Add the need of a step that was planned with `lead` and reached the device `lateness` seconds after the
        device had run out of work (negative: before)."""
        need = lead.given + lateness
        excess = need - lead.possible
        if excess > 0:  # also without a rest it would have been late
            self._needs.add(max(lead.possible, min(self._spare.given + excess, self._spare.possible)))
            return
        self._needs.add(need)
        if lead.given < lead.possible:
            self._spare = lead
