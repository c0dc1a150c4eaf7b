"""When the next step is planned, where steps are planned ahead of the device: as late as the device allows.

Whoever comes once a step is planned waits for the next but one. So the host rests until the step under way is about to
end, less a lead. How long that must be, nobody needs to measure: waking up, planning, launching, what a prediction is
off, how late the host hears of a step's end. It grows whenever the device ran out of work behind a rest, and shrinks
slowly, so that this happens once in some hundred steps.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.core.state import EngineState
from engine.core.types import StepPlan

FIRST_LEAD_S = 0.005
LEAST_LEAD_S = 0.0001
"""What it grows from again where predictions have long been short."""
LONGER = 1.2
SHORTER = 0.998
"""Balanced if log(LONGER) / -log(SHORTER), 91 steps, are in time for each that is late."""
LONGEST_REST_S = 0.25
"""Whoever stops the engine waits no longer, nor does a device for a prediction that is far off."""


class Pace:
    """Attributes:
    lead: seconds before the predicted end of a step at which the next one is planned.
    """

    def __init__(self, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self.lead = FIRST_LEAD_S
        self._is_behind = self._has_rested = False
        self._clock, self._sleep = clock, sleep

    def rest(self, state: EngineState) -> float:
        """Until the next step should be planned; the time that it is then."""
        now, plan = self._clock(), _computing(state)
        self._is_behind, self._has_rested = plan is not None, False
        if plan is None:
            return now
        wait = state.now + plan.predicted - self.lead - now  # it began when the state last changed
        if wait <= 0:
            return now
        self._has_rested = True
        self._sleep(min(wait, LONGEST_REST_S))
        return self._clock()

    def note(self, *, late: bool) -> None:
        """The device has the step that was rested for. late: it had run out of work."""
        if late and self._has_rested:
            self.lead *= LONGER
        elif self._is_behind:
            self.lead = max(LEAST_LEAD_S, self.lead * SHORTER)


def _computing(state: EngineState) -> StepPlan | None:
    """What the device is at; one that computes nothing is done at once, whatever steps take otherwise."""
    plan = state.under_way[0].plan if state.under_way else None
    return plan if plan and plan.chunks else None
