"""When the next step is planned, where steps are planned ahead of the device: as late as the device allows.

Whoever comes once a step is planned waits for the next but one. So the host rests until the step under way is about to
end, less what it takes itself until the device has the next one: no later, or the device would idle.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.core.state import EngineState

LEAD_KEPT = 0.98
"""Of the longest lead, a step: a stall of the host is forgotten within some hundred steps."""


class Pace:
    """Attributes:
    lead: seconds from when a step should be planned until the device has it, the longest of late: waking up, planning
        and launching.
    """

    def __init__(self, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self.lead = 0.0
        self._due = 0.0
        self._clock, self._sleep = clock, sleep

    def rest(self, state: EngineState) -> float:
        """Until the next step should be planned; the time that it is then."""
        now = self._clock()
        self._due = self._when(state, now)
        if self._due <= now:
            return now
        self._sleep(self._due - now)
        return self._clock()

    def note_launch(self) -> None:
        """The device has the step that was rested for."""
        self.lead = max(self._clock() - self._due, self.lead * LEAD_KEPT)

    def _when(self, state: EngineState, now: float) -> float:
        """At once, unless a step is under way whose time is known; that one began when the state last changed."""
        if not state.under_way:
            return now
        shortest = state.under_way[0].plan.predicted * state.ledger.model.shortest
        return state.now + max(0.0, shortest - self.lead)
