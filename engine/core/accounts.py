"""Fairness between the tenants of a lane: virtual token counters, charged in measured device time.

After Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): the tenant that was served least goes
first. A tenant that returns gets at least the smallest counter of the waiting tenants, so that idle time earns no
credit. The counters count device seconds divided by weight, not tokens, so that long contexts and adapters are charged
at their cost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from engine.core.recent import RecentTenants
from engine.core.types import Lane


@dataclass(slots=True)
class Account:
    """Device time charged to one tenant in one lane since the engine started, with its weight and virtual counter."""

    weight: float = 1.0
    served: float = 0.0
    """The virtual counter: device seconds divided by weight, raised when the tenant returns after a pause."""
    seconds: float = 0.0
    """Device seconds that were charged to the tenant, including tokens that were computed again after a preemption."""


class Accounts:
    """Accounts of all tenants by lane. Only `commit.py`, `apply.py` and the ledger change them."""

    def __init__(self) -> None:
        self.of: dict[tuple[Lane, str], Account] = {}
        self._last_left = dict.fromkeys(Lane, 0.0)
        self._recent = {lane: RecentTenants() for lane in Lane}

    def get(self, lane: Lane, tenant: str) -> Account:
        account = self.of.get((lane, tenant))
        if account is None:
            account = self.of[lane, tenant] = Account()
        return account

    def arrive(self, lane: Lane, tenant: str, weight: float, waiting: Collection[str], now: float) -> None:
        """Record the arrival and the weight of a tenant's new request. If the tenant has no other waiting request, its
        counter, if lower, is raised to the smallest counter of the waiting tenants or, if none waits, of the tenant
        that last left the queue.

        Args:
            waiting: tenants with waiting requests in this lane, the new request not included.
            now: time of arrival, in seconds on the engine's clock.
        """
        self._recent[lane].note(tenant, now)
        account = self.get(lane, tenant)
        account.weight = weight
        if tenant in waiting:
            return
        least = min((self.get(lane, other).served for other in waiting), default=self._last_left[lane])
        account.served = max(account.served, least)

    def leave(self, lane: Lane, tenant: str) -> None:
        """Record that the last waiting request of a tenant started to run or ended. The tenant's present counter
        becomes the minimum for tenants that arrive while none waits."""
        self._last_left[lane] = self.get(lane, tenant).served

    def is_shared(self, lane: Lane, waiting: Collection[str], now: float) -> bool:
        """Return whether a lane is in use by at least two tenants: those in `waiting`, and those that have sent a
        request within `RECENT_S` seconds before `now`."""
        recent = self._recent[lane]
        return len(waiting) > 1 or any(recent.has_other(tenant, now) for tenant in (*waiting, recent.newest))

    def gap(self, lane: Lane, waiting: Iterable[str]) -> float:
        """Return the largest difference between the counters of the tenants in `waiting`, in device seconds divided by
        weight; 0 if there are none."""
        counters = [self.get(lane, tenant).served for tenant in waiting]
        return max(counters) - min(counters) if counters else 0.0
