"""The section `lanes` of the configuration: capacity and latency goals of the lanes of one base model."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.config import BATCH_GOALS, INTERACTIVE_GOALS, LaneGoals
from engine.core.messages.requests import Lane


@dataclass(frozen=True, slots=True)
class LaneConfig:
    """Capacity and latency goals of one lane. The fields from `ttft_s` on are the goals, explained at LaneGoals."""

    max_requests: int
    """Maximum number of answers of this lane in the gateway, waiting and running: a request with `n: 4` counts as four.
    Tenants share them by weight. A request that does not fit is refused with lane_queue_full."""
    ttft_s: float
    itl_s: float
    attainment: float
    max_wait_s: float

    def __post_init__(self) -> None:
        if self.max_requests < 1:
            raise ValueError(f"max_requests must be at least 1, not {self.max_requests}")
        self.goals()  # raises ValueError for a goal that is out of range

    def goals(self) -> LaneGoals:
        return LaneGoals(self.ttft_s, self.itl_s, self.attainment, self.max_wait_s)


@dataclass(frozen=True, slots=True)
class InteractiveLane(LaneConfig):
    max_requests: int = 1000
    ttft_s: float = INTERACTIVE_GOALS.ttft_s
    itl_s: float = INTERACTIVE_GOALS.itl_s
    attainment: float = INTERACTIVE_GOALS.attainment
    max_wait_s: float = INTERACTIVE_GOALS.max_wait_s


@dataclass(frozen=True, slots=True)
class BatchLane(LaneConfig):
    max_requests: int = 10_000
    ttft_s: float = BATCH_GOALS.ttft_s
    itl_s: float = BATCH_GOALS.itl_s
    attainment: float = BATCH_GOALS.attainment
    max_wait_s: float = BATCH_GOALS.max_wait_s


@dataclass(frozen=True, slots=True)
class LanesConfig:
    interactive: InteractiveLane = InteractiveLane()
    batch: BatchLane = BatchLane()

    def of(self, lane: Lane) -> LaneConfig:
        return self.interactive if lane is Lane.INTERACTIVE else self.batch

    def goals(self) -> dict[Lane, LaneGoals]:
        return {lane: self.of(lane).goals() for lane in Lane}

    def capacity(self) -> dict[Lane, int]:
        """Return the maximum number of answers in the gateway, by lane."""
        return {lane: self.of(lane).max_requests for lane in Lane}
