"""Circuit breaker: after repeated failures, calls are skipped except for an occasional probe."""

from __future__ import annotations

from collections.abc import Callable


class Breaker:
    """Opens after `threshold` failures in a row; while open, lets one call through every `cooldown` seconds."""

    def __init__(self, threshold: int, cooldown: float, clock: Callable[[], float]) -> None:
        self._threshold = threshold
        self._cooldown = cooldown
        self._clock = clock
        self._failures = 0
        self._next_probe = 0.0

    @property
    def is_open(self) -> bool:
        return self._failures >= self._threshold

    def allows(self) -> bool:
        """Return whether a call may be made. True while the circuit is open uses up the probe of this cooldown."""
        if not self.is_open:
            return True
        if self._clock() < self._next_probe:
            return False
        self._next_probe = self._clock() + self._cooldown
        return True

    def failed(self, *, certain: bool = False) -> None:
        """Record a failure. `certain` opens the circuit at once: the call had all the time that it could need."""
        self._failures = self._threshold if certain else self._failures + 1
        self._next_probe = self._clock() + self._cooldown

    def succeeded(self) -> None:
        self._failures = 0
