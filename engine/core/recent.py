"""Memory of which parties (see accounts.py) have sent a request recently, as far as needed to know whether there is more than one."""

from __future__ import annotations

RECENT_S = 10.0
"""Seconds for which a party counts as active after a request, because people read the answer before they send
another."""


class RecentParties:
    """Remembers the two parties whose requests came last, in constant time and memory."""

    def __init__(self) -> None:
        self._came: dict[str, float] = {}
        """Arrival of the last request of each of the two parties, in seconds on the engine's clock, the older first."""

    @property
    def newest(self) -> str:
        """Party whose request came last; an empty string means that no request has come."""
        return next(reversed(self._came), "")

    def note(self, party: str, now: float) -> None:
        """Record that a request of `party` arrived at `now` (seconds on the engine's clock), and forget all but the
        last two parties."""
        self._came.pop(party, None)
        self._came[party] = now
        if len(self._came) > 2:
            del self._came[next(iter(self._came))]

    def has_other(self, party: str, now: float) -> bool:
        """Return whether a party other than `party` sent a request within `RECENT_S` seconds before `now`."""
        return any(other != party and now - came <= RECENT_S for other, came in self._came.items())
