"""Shares of a common capacity: limits how much each tenant may hold, so that no tenant takes all of it.

The gateway divides a lane's concurrent answers in this way, and the engine divides the memory of prepared grammars.
While the total is within the capacity, each request is admitted, and a tenant that is alone may take all of it. Beyond
the capacity

- a tenant that holds nothing is admitted with one request, regardless of its weight and of the size of the request;
- a tenant that holds something is admitted up to its share, which is the capacity times its weight over the weights
  of all tenants that hold something, and refused above it, so that the heaviest tenants are refused first.

Nothing that was admitted is revoked, so the total exceeds the capacity while newcomers take their shares. Apart from
one request for each tenant, the total stays below `1 + ln(k)` times the capacity with `k` tenants of equal weight (1.5
times with two of them), and below `k` times the capacity with any weights. It shrinks as tenants above their shares
free what they hold.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Holding:
    """Weight of one tenant, and the amount of the shared capacity that it holds, in the caller's unit."""

    weight: float
    amount: int = 0


class Shares:
    """Record of how much each tenant holds of one shared capacity, such as the concurrent answers of a lane, and the
    rule by which a tenant may take more. Every operation takes constant time."""

    def __init__(self) -> None:
        self._holdings: dict[str, Holding] = {}
        self._total = 0
        self._weights = 0.0

    @property
    def total(self) -> int:
        """Amount of the shared capacity that all tenants together hold, in the caller's unit."""
        return self._total

    def held(self, tenant: str) -> int:
        """Return the amount of the shared capacity that one tenant holds; 0 for an unknown tenant."""
        return self._holdings[tenant].amount if tenant in self._holdings else 0

    def admits(self, tenant: str, amount: int, capacity: int) -> bool:
        """Return whether a tenant may take `amount` more of a shared `capacity`, without recording it: True while the
        total stays within the capacity, and beyond it if the tenant holds nothing (unless `capacity` is 0) or stays
        within the share of its recorded weight."""
        if self._total + amount <= capacity:
            return True
        holding = self._holdings.get(tenant)
        if holding is None:
            return capacity > 0
        return holding.amount + amount <= capacity * holding.weight / self._weights

    def add(self, tenant: str, weight: float, amount: int) -> None:
        """Record that a tenant has taken `amount` more of the shared capacity. `weight` is used only if it held nothing
        before."""
        if tenant not in self._holdings:
            self._holdings[tenant] = Holding(weight)
            self._weights += weight
        self._holdings[tenant].amount += amount
        self._total += amount

    def remove(self, tenant: str, amount: int) -> None:
        """Record that a tenant has freed `amount` of the shared capacity. A tenant that holds nothing any more is
        forgotten with its weight. Raises KeyError if the tenant holds nothing."""
        holding = self._holdings[tenant]
        holding.amount -= amount
        self._total -= amount
        if holding.amount == 0:
            del self._holdings[tenant]
            self._weights = self._weights - holding.weight if self._holdings else 0.0
