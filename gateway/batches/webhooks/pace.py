"""How long a delivery may take, and when it is tried again."""

from __future__ import annotations

from dataclasses import dataclass
from random import uniform

DAY = 86_400.0


@dataclass(frozen=True, slots=True)
class Pace:
    """In seconds."""

    poll: float = 1.0
    """Between two looks for events that are due."""
    timeout: float = 10.0
    """From resolving the name to the status line."""
    lease: float = 30.0
    """After which an event goes to another gateway: a delivery and a Redis that hesitates fit in well."""
    first_retry: float = 5.0
    longest_retry: float = 3 * 3600.0
    give_up: float = 3 * DAY
    """As long as OpenAI tries."""

    def retry_in(self, age: float) -> float:
        """Seconds until an event is tried again that is `age` old: as long as it has waited already, which doubles its
        age, give or take half, so that a server that comes back is not met by all of them at once."""
        return min(max(age, self.first_retry), self.longest_retry) * uniform(0.5, 1.5)
