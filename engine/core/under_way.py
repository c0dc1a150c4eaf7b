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
    owners = [live[chunk.request_id] for chunk in plan.chunks]
    unpaid = [
        chunk.num_tokens if chunk.start >= seq.num_paid else _unpaid(chunk, seq)
        for chunk, seq in zip(plan.chunks, owners, strict=True)
    ]
    sequences = {chunk.request_id: seq for chunk, seq in zip(plan.chunks, owners, strict=True)}
    sequences.update({load.request_id: live[load.request_id] for load in plan.loads})
    return StepUnderWay(plan, sequences, tuple(unpaid))


def _unpaid(chunk: ScheduledChunk, seq: Sequence) -> int:
    return max(0, chunk.start + chunk.num_tokens - seq.num_paid)
