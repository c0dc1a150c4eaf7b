"""Fairness between the tenants of a lane: virtual token counters, charged in measured device time.

After Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): the tenant that was served least goes
first. The counter of a tenant that returns is raised to the smallest counter of the waiting tenants, so that idle time
earns no credit. The paper's counters count tokens. These count device seconds divided by the tenant's weight, so that
long contexts, large adapters and adapter loads are charged at their real cost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from engine.core.recent import RecentTenants
from engine.core.types import Lane


@dataclass(slots=True)
class Account:
    """Service that one tenant has received in one lane."""

    weight: float = 1.0
    served: float = 0.0
    """The virtual counter: device seconds divided by weight, raised when the tenant returns after a pause."""
    seconds: float = 0.0
    """Device seconds that the tenant has actually received."""


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
        """Note that a request arrived, and raise its tenant's counter if none of the tenant's requests was waiting.

        Args:
            waiting: tenants with waiting requests in this lane, the new request not included.
        """
        self._recent[lane].note(tenant, now)
        account = self.get(lane, tenant)
        account.weight = weight
        if tenant in waiting:
            return
        least = min((self.get(lane, other).served for other in waiting), default=self._last_left[lane])
        account.served = max(account.served, least)

    def leave(self, lane: Lane, tenant: str) -> None:
        """Note that the last waiting request of a tenant started to run or ended."""
        self._last_left[lane] = self.get(lane, tenant).served

    def is_shared(self, lane: Lane, waiting: Collection[str], now: float) -> bool:
        """Return whether at least two tenants wait in a lane or have sent a request lately."""
        recent = self._recent[lane]
        return len(waiting) > 1 or any(recent.has_other(tenant, now) for tenant in (*waiting, recent.newest))

    def gap(self, lane: Lane, waiting: Iterable[str]) -> float:
        """Return the largest difference between the counters of the waiting tenants, in device seconds by weight."""
        counters = [self.get(lane, tenant).served for tenant in waiting]
        return max(counters) - min(counters) if counters else 0.0
