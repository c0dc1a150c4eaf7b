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
"""Rather too long: a chat that just missed a step is no worse off than without a rest."""
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
        now = self._clock()
        predicted = state.under_way[0].plan.predicted if state.under_way else 0.0
        wait = state.now + predicted - self.lead - now  # it began when the state last changed
        self._is_behind, self._has_rested = predicted > 0, wait > 0
        if not self._has_rested:
            return now
        self._sleep(min(wait, LONGEST_REST_S))
        return self._clock()

    def note(self, *, late: bool) -> None:
        """The device has the step that was rested for. late: it had run out of work."""
        if late and self._has_rested:
            self.lead *= LONGER
        elif self._is_behind:
            self.lead = max(LEAST_LEAD_S, self.lead * SHORTER)
