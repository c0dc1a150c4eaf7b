"""A router's record of the links over which replicas exchange KV."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

WINDOW_S, LEAST_WINDOW_S = 5.0, 1.0
"""Window, in seconds and with exponential decay, over which a link's utilisation is measured, and the shortest window
that is assumed after a link's first transfer."""


@dataclass(slots=True)
class LinkUse:
    """One direction of a replica's link, as far as this router's transfers use it. Times are in seconds on the router's
    clock."""

    until: float = 0.0
    """When the last transfer is predicted to have ended."""
    _seconds: float = 0.0
    """Seconds of transfers, with exponential decay until `_noted_at`."""
    _noted_at: float = 0.0
    _first_at: float | None = None

    def take(self, seconds: float, until: float, now: float) -> None:
        """Count a KV transfer, decided on at `now`, that occupies the link for `seconds` and is predicted to end at
        `until`."""
        if self._first_at is None:
            self._first_at = self._noted_at = now
        self._seconds = self._seconds * exp((self._noted_at - now) / WINDOW_S) + seconds
        self._noted_at, self.until = now, until

    def share(self, now: float) -> float:
        """Return the link's recent utilisation by this router's transfers, as a share of the time, with exponential
        decay over `WINDOW_S` seconds. A transfer counts in full once it is decided, so that more than 1 means that more
        transfers were placed on the link than it can carry."""
        if self._first_at is None:
            return 0.0
        window = WINDOW_S * (1 - exp((self._first_at - now) / WINDOW_S))
        return self._seconds * exp((self._noted_at - now) / WINDOW_S) / max(window, LEAST_WINDOW_S)
