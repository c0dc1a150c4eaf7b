"""A step between its plan and its result.

Where steps are planned ahead, one is planned and committed while another is computed. Until a step's result is there
its requests may have ended, its sequences may have been preempted, and their ids may have passed to others: what the
result must be read with is written down when the plan is committed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from engine.core.sequence import Sequence
from engine.core.types import ScheduledChunk, StepPlan


@dataclass(frozen=True, slots=True)
class StepUnderWay:
    """Attributes:
    plan: what is being carried out.
    sequences: whom its chunks and loads are for, by request. Who has ended meanwhile gets nothing of the result, and
        pays for it: device time that was spent is somebody's.
    unpaid: of each chunk's tokens, how many are computed for the first time.
    """

    plan: StepPlan
    sequences: Mapping[str, Sequence]
    unpaid: tuple[int, ...]

    @property
    def awaiting(self) -> Iterator[Sequence]:
        """Whose next token it chooses."""
        return (self.sequences[chunk.request_id] for chunk in self.plan.chunks if chunk.samples)


def follow(plan: StepPlan, live: Mapping[str, Sequence]) -> StepUnderWay:
    """A plan that is being committed. `live`: every live request."""
    names = [chunk.request_id for chunk in plan.chunks] + [load.request_id for load in plan.loads]
    sequences = {name: live[name] for name in names if name in live}
    return StepUnderWay(plan, sequences, tuple([_unpaid(chunk, sequences[chunk.request_id]) for chunk in plan.chunks]))


def _unpaid(chunk: ScheduledChunk, seq: Sequence) -> int:
    return min(chunk.num_tokens, max(0, chunk.start + chunk.num_tokens - seq.num_paid))
