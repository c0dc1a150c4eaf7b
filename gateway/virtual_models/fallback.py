"""The policy `fallback`: the first member answers, unless it cannot or would be late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from engine.core.messages.requests import Lane
from gateway.virtual_models.policy import Asked, Shadow, Step, check_members


@dataclass(frozen=True, slots=True)
class Fallback:
    """Tries the members in order, also after a failure before the first token. Those whose engine is away, or where
    interactive requests would wait longer than `max_wait_s`, come last: slow ones, then absent ones."""

    policy: ClassVar[str] = "fallback"

    members: tuple[str, ...]
    max_wait_s: float = 0.0
    """Predicted seconds until the first token of an interactive request above which a member is passed over. 0 means
    the TTFT goal of its interactive lane."""
    shadow: Shadow | None = None

    def __post_init__(self) -> None:
        check_members(self.members, 2)
        if self.max_wait_s < 0:
            raise ValueError(f"max_wait_s must be at least 0, not {self.max_wait_s}")

    async def plan(self, request: Asked) -> Sequence[Step]:
        troubles = {member: self._trouble(request, member) for member in request.members}
        order = sorted(troubles, key=lambda member: ("", "queue", "down").index(troubles[member]))
        return [Step(member, _reason(member, troubles)) for member in order]

    def explain(self) -> str:
        wait = f"waits of {self.max_wait_s:g} s" if self.max_wait_s else "waits of their TTFT goals"
        return f"in order: {', '.join(self.members)}; passed over if away or for {wait}"

    def _trouble(self, request: Asked, member: str) -> str:
        state = request.state(member)
        if not state.ready:
            return "down"
        is_late = request.lane is Lane.INTERACTIVE and state.wait_s > (self.max_wait_s or state.ttft_s)
        return "queue" if is_late else ""


def _reason(member: str, troubles: dict[str, str]) -> str:
    """Return the reason for choosing a member. It is `first` for the first member that the tenant may use. For another,
    it says why the first one was passed over (`down` or `queue`), or is `next` if it was not. `troubles` has the
    members in the order of the configuration."""
    first = next(iter(troubles))
    return "first" if member == first else troubles[first] or "next"
