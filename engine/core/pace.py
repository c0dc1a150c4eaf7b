"""When the next step is planned, where steps are planned ahead of the device: as late as the device allows.

Whoever comes once a step is planned waits for the next but one. So the host rests until the step under way is about to
end, less a lead. How long that must be, nobody needs to measure: waking up, planning, launching, what a prediction is
off, how late the host hears of a step's end. It grows whenever the device ran out of work behind a rest, and shrinks
slowly, so that this happens once in some hundred steps.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.core.state import EngineState

FIRST_LEAD_S = 0.005
LONGER = 1.2
SHORTER = 0.998
"""Balanced if log(LONGER) / -log(SHORTER), 91 steps, are in time for each that is late."""


class Pace:
    """Attributes:
    lead: seconds before the predicted end of a step at which the next one is planned.
    """

    def __init__(self, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self.lead = FIRST_LEAD_S
        self._has_rested = False
        self._clock, self._sleep = clock, sleep

    def rest(self, state: EngineState) -> float:
        """Until the next step should be planned; the time that it is then."""
        now = self._clock()
        wait = _end_of_step(state, now) - self.lead - now
        self._has_rested = wait > 0
        if not self._has_rested:
            return now
        self._sleep(wait)
        return self._clock()

    def note(self, *, late: bool) -> None:
        """The device has the step that was rested for. late: it had run out of work."""
        self.lead *= LONGER if late and self._has_rested else SHORTER


def _end_of_step(state: EngineState, now: float) -> float:
    """Of the one under way, which began when the state last changed; now, if there is none."""
    return state.now + state.under_way[0].plan.predicted if state.under_way else now
