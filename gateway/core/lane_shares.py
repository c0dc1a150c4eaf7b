"""How many answers of a lane each tenant may have on their way at once, so that no tenant fills it for the others.

A lane has a capacity, counted in answers: a request with `n: 4` counts four. While the lane has room, every request is
admitted, and a tenant that is alone may take all of it. Once it is full, a tenant is admitted up to its share, which is
the capacity times its weight over the weights of all tenants that hold something. Above its share it is refused: the
heaviest tenants are refused first, and a tenant below its share is never refused for what others hold.

Nothing that was admitted is taken back, so a full lane goes over its capacity while newcomers take their shares: by a
half with two tenants of equal weight, and up to `1 + ln(k)` times the capacity if `k` tenants that want everything come
one after the other. It shrinks back as answers of the tenants above their shares end.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Holding:
    """What one tenant has on its way."""

    weight: float
    answers: int = 0


class LaneShares:
    """The answers on their way in one lane, by tenant. Every operation takes constant time."""

    def __init__(self) -> None:
        self._holdings: dict[str, Holding] = {}
        self._total = 0
        self._weights = 0.0

    @property
    def total(self) -> int:
        """Answers on their way, of all tenants."""
        return self._total

    def held(self, tenant: str) -> int:
        """Return the answers that a tenant has on their way."""
        return self._holdings[tenant].answers if tenant in self._holdings else 0

    def refusal(self, tenant: str, weight: float, answers: int, capacity: int) -> str:
        """Return why a request for so many answers does not fit now, for its caller; empty means that it fits.

        An empty lane takes a request of any size, if it has any capacity.
        """
        if self._total + answers <= capacity or (self._total == 0 and capacity > 0):
            return ""
        held = self.held(tenant)
        if held + answers <= capacity * self._share(tenant, weight):
            return ""
        return f"{self._total} answers are on their way, {held} of them of this tenant, and it has room for {capacity}"

    def add(self, tenant: str, weight: float, answers: int) -> None:
        """Count answers that begin. A weight that has changed since counts from when the tenant holds nothing."""
        if tenant not in self._holdings:
            self._holdings[tenant] = Holding(weight)
            self._weights += weight
        self._holdings[tenant].answers += answers
        self._total += answers

    def remove(self, tenant: str, answers: int) -> None:
        """Count answers that have ended."""
        holding = self._holdings[tenant]
        holding.answers -= answers
        self._total -= answers
        if holding.answers == 0:
            del self._holdings[tenant]
            self._weights = self._weights - holding.weight if self._holdings else 0.0

    def _share(self, tenant: str, weight: float) -> float:
        """Return the tenant's part of the weights of all that hold something, itself included."""
        if tenant in self._holdings:
            return self._holdings[tenant].weight / self._weights
        return weight / (self._weights + weight)
