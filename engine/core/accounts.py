"""Fairness between the tenants of a lane: virtual token counters, charged in measured device time.

After Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): whoever was served least goes first; a
tenant that comes back is lifted to the least counter of those waiting, so that idleness is not saved up. Its counters
count tokens; ours count device seconds divided by the tenant's weight, so that long contexts, large adapters and
adapter loads cost what they cost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from engine.core.recent import RecentTenants
from engine.core.types import Lane


@dataclass(slots=True)
class Account:
    """One tenant in one lane."""

    weight: float = 1.0
    served: float = 0.0
    """The virtual counter: device seconds / weight, lifted when the tenant comes back."""
    seconds: float = 0.0
    """Device seconds it was really given."""


class Accounts:
    """`commit.py` and the ledger are its only writers."""

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
        """A request came. `waiting`: tenants that wait in this lane without it."""
        self._recent[lane].note(tenant, now)
        account = self.get(lane, tenant)
        account.weight = weight
        if tenant in waiting:
            return
        least = min((self.get(lane, other).served for other in waiting), default=self._last_left[lane])
        account.served = max(account.served, least)

    def leave(self, lane: Lane, tenant: str) -> None:
        """The last waiting request of a tenant began to run, or left."""
        self._last_left[lane] = self.get(lane, tenant).served

    def is_shared(self, lane: Lane, waiting: Collection[str], now: float) -> bool:
        """Return whether at least two tenants wait in a lane or have sent a request lately."""
        recent = self._recent[lane]
        return len(waiting) > 1 or any(recent.has_other(tenant, now) for tenant in (*waiting, recent.newest))

    def gap(self, lane: Lane, waiting: Iterable[str]) -> float:
        """Largest difference of the counters of tenants that wait, in seconds."""
        counters = [self.get(lane, tenant).served for tenant in waiting]
        return max(counters) - min(counters) if counters else 0.0
