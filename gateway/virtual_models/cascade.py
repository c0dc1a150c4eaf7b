"""The policy `cascade`: a small member answers what it can, a large one the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from gateway.virtual_models.acceptance import Acceptance
from gateway.virtual_models.policy import Asked, Shadow, Step, check_members


@dataclass(frozen=True, slots=True)
class Cascade:
    """Holds back the answer of each member but the last until it passes the tests; the first that does is sent. Where
    none does, the last member answers, as it does if the others fail."""

    policy: ClassVar[str] = "cascade"

    members: tuple[str, ...]
    """The members, the cheapest first."""
    accept: Acceptance = field(default_factory=Acceptance)
    patience: float = 4.0
    """A stream waits for a member's complete answer at most this many times the TTFT goal of its interactive lane;
    then the next member answers. Answers that are not streamed, and those of the batch lane, wait without a limit."""
    shadow: Shadow | None = None

    def __post_init__(self) -> None:
        check_members(self.members, 2)
        if not self.patience > 0:
            raise ValueError(f"patience must be positive, not {self.patience}")

    async def plan(self, request: Asked) -> Sequence[Step]:
        *tested, last = request.members
        steps = [Step(member, "small", self.accept, self._patience(request, member)) for member in tested]
        return [*steps, Step(last, "large")]

    def explain(self) -> str:
        return f"{' then '.join(self.members)}; accepted if: {self.accept.explain()}"

    def _patience(self, request: Asked, member: str) -> float:
        return self.patience * request.state(member).ttft_s
