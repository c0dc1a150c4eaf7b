"""Decides when the next step is planned, where steps are planned ahead of the device: as late as the device allows.

A request that arrives after a step was planned has to wait for a later one. The host therefore rests until shortly
before the predicted end of the step under way. The lead must cover waking up, planning, launching, the error of the
prediction, and the delay until the host learns that a step has ended. None of these is measured: the lead grows
whenever the device ran out of work after a rest, and shrinks slowly otherwise, so that the device runs out of work
about once in a hundred steps.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.core.state import EngineState

FIRST_LEAD_S = 0.005
"""Initial lead in seconds, rather too long: a request that just missed a step is then no worse off than without a
rest."""
LEAST_LEAD_S = 0.0001
"""Minimum lead in seconds, from which it can grow again after predictions have been too short for a long time."""
LONGER = 1.2
SHORTER = 0.998
"""Factors of the lead after a late step and after a step in time. They balance if log(LONGER) / -log(SHORTER), which is
91, steps are in time for each late one."""
LONGEST_REST_S = 0.25
"""Maximum rest in seconds: how long a caller that stops the engine, or a device after a far too long prediction, may
wait."""


class Pace:
    """Delays each step that is planned ahead, and adapts by how much: `lead` is the number of seconds before the
    predicted end of a step at which the next step is planned. An engine has one Pace."""

    def __init__(self, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self.lead = FIRST_LEAD_S
        self._is_behind = self._has_rested = False
        self._clock, self._sleep = clock, sleep

    def rest(self, state: EngineState) -> float:
        """Sleep until `lead` seconds before the predicted end of the step under way, if any, but at most
        `LONGEST_REST_S` seconds, and return the clock's time afterwards, in seconds."""
        now = self._clock()
        predicted = state.under_way[0].plan.predicted if state.under_way else 0.0
        wait = state.now + predicted - self.lead - now  # the step under way began when the state last changed
        self._is_behind, self._has_rested = predicted > 0, wait > 0
        if not self._has_rested:
            return now
        self._sleep(min(wait, LONGEST_REST_S))
        return self._clock()

    def note(self, *, late: bool) -> None:
        """Adapt `lead` after the planned step was submitted: it grows if the device had run out of work (`late`)
        despite a rest, and otherwise shrinks slightly if there was a predicted step to wait for."""
        if late and self._has_rested:
            self.lead *= LONGER
        elif self._is_behind:
            self.lead = max(LEAST_LEAD_S, self.lead * SHORTER)
