"""Timeouts of webhook deliveries, and the times at which they are tried again."""

from __future__ import annotations

from dataclasses import dataclass
from random import uniform

DAY = 86_400.0


@dataclass(frozen=True, slots=True)
class Pace:
    """Timing of deliveries. All values are in seconds."""

    poll: float = 1.0
    """Pause between two polls of the outbox."""
    timeout: float = 10.0
    """Time limit of one attempt, from resolving the host name to receiving the status line."""
    lease: float = 30.0
    """Time after which another gateway may claim the event. It is long enough for a delivery and a slow Redis."""
    first_retry: float = 5.0
    longest_retry: float = 3 * 3600.0
    give_up: float = 3 * DAY
    """Age at which an event is given up. OpenAI tries as long."""

    def retry_in(self, age: float) -> float:
        """Return the seconds until an event of this age (in seconds) is tried again: as long as its age, give or take
        half, within the bounds. The age thus about doubles between attempts, and a server that comes back is not hit by
        all events at once."""
        return min(max(age, self.first_retry), self.longest_retry) * uniform(0.5, 1.5)
