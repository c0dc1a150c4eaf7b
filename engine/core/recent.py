"""Tenants that have sent a request recently: just enough is kept to know whether there is more than one."""

from __future__ import annotations

RECENT_S = 10.0
"""Seconds after a tenant's last request for which another one is expected, because people read and then answer."""


class RecentTenants:
    """Remembers the two tenants whose requests came last, in constant time and memory."""

    def __init__(self) -> None:
        self._came: dict[str, float] = {}
        """Arrival of the last request of each of the two tenants, in seconds on the engine's clock, the older first."""

    @property
    def newest(self) -> str:
        """Tenant whose request came last; an empty string means that no request has come."""
        return next(reversed(self._came), "")

    def note(self, tenant: str, now: float) -> None:
        """Note that a request of a tenant has arrived."""
        self._came.pop(tenant, None)
        self._came[tenant] = now
        if len(self._came) > 2:
            del self._came[next(iter(self._came))]

    def has_other(self, tenant: str, now: float) -> bool:
        """Return whether a request of another tenant came within the last `RECENT_S` seconds."""
        return any(other != tenant and now - came <= RECENT_S for other, came in self._came.items())
