"""The policy `split`: each member gets its share of conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, Literal

from gateway.virtual_models.policy import Asked, Shadow, Step, check_members, fraction


@dataclass(frozen=True, slots=True)
class Split:
    """Divides requests among the members by weight."""

    policy: ClassVar[str] = "split"

    weights: Mapping[str, float]
    """Weight of each member; only their ratios matter. A member with weight 0 gets no requests."""
    sticky: Literal["session", "tenant", "request"] = "session"
    """What stays on one member: a conversation, all requests of a tenant, or only the single request."""
    shadow: Shadow | None = None

    def __post_init__(self) -> None:
        check_members(self.members)
        if not all(0 <= weight < float("inf") for weight in self.weights.values()) or not any(self.weights.values()):
            raise ValueError("weights must be at least 0, and one of them above it")

    @property
    def members(self) -> Sequence[str]:
        return tuple(self.weights)

    async def plan(self, request: Asked) -> Sequence[Step]:
        chances = [(member, self.weights[member]) for member in request.members if self.weights[member]]
        if not chances:
            return ()
        point = fraction(self._key(request)) * sum(weight for _, weight in chances)
        ends = accumulate(weight for _, weight in chances)
        choice = next((member for (member, _), end in zip(chances, ends, strict=True) if point < end), chances[-1][0])
        return (Step(choice, "split"),)

    def explain(self) -> str:
        total = sum(self.weights.values())
        shares = ", ".join(f"{member} {weight / total:.3g}" for member, weight in self.weights.items())
        return f"share of each {self.sticky}: {shares}"

    def _key(self, request: Asked) -> str:
        if self.sticky == "request":
            return request.request
        return request.tenant if self.sticky == "tenant" else f"{request.tenant} {request.session}"
