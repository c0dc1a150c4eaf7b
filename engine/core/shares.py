"""How much of what tenants share each of them may hold at once, so that no tenant takes all of it from the others.

The gateway shares out a lane's answers like this, and the engine the memory of prepared grammars. While the total is
within its capacity, every request is admitted, and a tenant that is alone may take all of it. Beyond the capacity

- a tenant that holds nothing is admitted with one request, whatever its weight and however large the request;
- a tenant that holds something is admitted up to its share, which is the capacity times its weight over the weights
  of all tenants that hold something, and refused above it, so that the heaviest tenants are refused first.

Nothing that was admitted is taken back, so the total exceeds the capacity while newcomers take their shares. Apart from
one request for each tenant, it stays below `1 + ln(k)` times the capacity with `k` tenants of equal weight (by a half
too much with two of them), and below `k` times the capacity with any weights. It shrinks as tenants above their shares
give back what they hold.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Holding:
    """What one tenant holds."""

    weight: float
    amount: int = 0


class Shares:
    """The amounts that tenants hold of one shared capacity. Every operation takes constant time."""

    def __init__(self) -> None:
        self._holdings: dict[str, Holding] = {}
        self._total = 0
        self._weights = 0.0

    @property
    def total(self) -> int:
        """What all tenants hold together."""
        return self._total

    def held(self, tenant: str) -> int:
        """Return what one tenant holds."""
        return self._holdings[tenant].amount if tenant in self._holdings else 0

    def admits(self, tenant: str, weight: float, amount: int, capacity: int) -> bool:
        """Return whether a tenant may have `amount` more now."""
        if self._total + amount <= capacity:
            return True
        holding = self._holdings.get(tenant)
        if holding is None:
            return capacity > 0
        return holding.amount + amount <= capacity * holding.weight / self._weights

    def add(self, tenant: str, weight: float, amount: int) -> None:
        """Count what a tenant begins to hold. A changed weight counts from when the tenant holds nothing."""
        if tenant not in self._holdings:
            self._holdings[tenant] = Holding(weight)
            self._weights += weight
        self._holdings[tenant].amount += amount
        self._total += amount

    def remove(self, tenant: str, amount: int) -> None:
        """Count what a tenant has given back."""
        holding = self._holdings[tenant]
        holding.amount -= amount
        self._total -= amount
        if holding.amount == 0:
            del self._holdings[tenant]
            self._weights = self._weights - holding.weight if self._holdings else 0.0
