"""Which tenants have sent a request lately: enough is kept to know whether there is more than one."""

from __future__ import annotations

RECENT_S = 10.0
"""A tenant whose last request came within so many seconds is expected to send another: people read, then answer."""


class RecentTenants:
    """Remembers the two tenants whose requests came last, in constant time and memory."""

    def __init__(self) -> None:
        self._came: dict[str, float] = {}
        """When the last request of each of the two came, in seconds, the older first."""

    @property
    def newest(self) -> str:
        """The tenant whose request came last; empty means that none has come."""
        return next(reversed(self._came), "")

    def note(self, tenant: str, now: float) -> None:
        """A request of a tenant has come."""
        self._came.pop(tenant, None)
        self._came[tenant] = now
        if len(self._came) > 2:
            del self._came[next(iter(self._came))]

    def has_other(self, tenant: str, now: float) -> bool:
        """Return whether a request of another tenant than this one came lately."""
        return any(other != tenant and now - came <= RECENT_S for other, came in self._came.items())
