"""Circuit breaker: stops calls to a component that fails, and lets one probe pass now and then."""

from __future__ import annotations

from collections.abc import Callable


class Breaker:
    """Circuit breaker of one component. Opens after `threshold` failures in a row and closes at the next success. While
    open, allows one probe every `cooldown` seconds. `clock` returns the time in seconds."""

    def __init__(self, threshold: int, cooldown: float, clock: Callable[[], float]) -> None:
        self._threshold = threshold
        self._cooldown = cooldown
        self._clock = clock
        self._failures = 0
        self._next_probe = 0.0

    @property
    def is_open(self) -> bool:
        return self._failures >= self._threshold

    @property
    def is_shut(self) -> bool:
        """Return whether the breaker is open and its cooldown has not passed, so that no call is allowed now. Unlike
        `allows`, this does not use up the probe."""
        return self.is_open and self._clock() < self._next_probe

    def allows(self) -> bool:
        """Return whether a call may be made. While the circuit is open, True is returned only once per cooldown."""
        if not self.is_open:
            return True
        if self._clock() < self._next_probe:
            return False
        self._next_probe = self._clock() + self._cooldown
        return True

    def failed(self, *, certain: bool = False) -> None:
        """Record a failed call and restart the cooldown, in which a circuit that is open allows no call. `certain`
        opens the circuit at once: the call timed out although it had the longest time limit."""
        self._failures = self._threshold if certain else self._failures + 1
        self._next_probe = self._clock() + self._cooldown

    def given_up(self) -> None:
        """Record a call whose caller left before its outcome was known. If the circuit is open, the next call becomes
        the probe at once: otherwise, a caller that always leaves would keep the circuit open for all others."""
        self._next_probe = self._clock()

    def succeeded(self) -> None:
        self._failures = 0
