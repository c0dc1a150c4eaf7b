"""The policy `lane`: each lane has its own member."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from engine.core.messages.requests import Lane
from gateway.virtual_models.policy import Asked, Shadow, Step


@dataclass(frozen=True, slots=True)
class ByLane:
    """Sends interactive requests to one member and batch requests to another, such as a cheaper one."""

    policy: ClassVar[str] = "lane"

    interactive: str
    batch: str
    shadow: Shadow | None = None

    @property
    def members(self) -> Sequence[str]:
        return tuple(dict.fromkeys((self.interactive, self.batch)))

    async def plan(self, request: Asked) -> Sequence[Step]:
        member = self.interactive if request.lane is Lane.INTERACTIVE else self.batch
        return (Step(member, "lane"),) if member in request.members else ()

    def explain(self) -> str:
        return f"interactive requests: {self.interactive}; batch requests: {self.batch}"
