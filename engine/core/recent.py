"""Memory of which senders, by name, have sent a request recently, as far as needed to know whether there is more than
one. A sender is a tenant or, to the scheduler, a party (see accounts.py)."""

from __future__ import annotations

RECENT_S = 10.0
"""Seconds for which a sender counts as active after a request, because people read the answer before they send
another."""


class RecentSenders:
    """Remembers the two senders whose requests came last, in constant time and memory."""

    def __init__(self) -> None:
        self._came: dict[str, float] = {}
        """Arrival of the last request of each of the two senders, in seconds on the engine's clock, the older first."""

    @property
    def newest(self) -> str:
        """Sender whose request came last; an empty string means that no request has come."""
        return next(reversed(self._came), "")

    def note(self, sender: str, now: float) -> None:
        """Record that a request of `sender` arrived at `now` (seconds on the engine's clock), and forget all but the
        last two senders."""
        self._came.pop(sender, None)
        self._came[sender] = now
        if len(self._came) > 2:
            del self._came[next(iter(self._came))]

    def has_other(self, sender: str, now: float) -> bool:
        """Return whether a sender other than `sender` sent a request within `RECENT_S` seconds before `now`."""
        return any(other != sender and now - came <= RECENT_S for other, came in self._came.items())
