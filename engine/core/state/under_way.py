"""A step between the commit of its plan and its result. Where steps are planned ahead, its requests may end, its
sequences may be preempted and new requests may reuse their ids before the result arrives. The data needed to interpret
the result is therefore recorded when the plan is committed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from engine.core.messages.step import ScheduledChunk, StepPlan
from engine.core.state.sequence import Sequence


@dataclass(frozen=True, slots=True)
class StepUnderWay:
    """A committed step whose result has not been absorbed into the engine's state yet.

    Attributes:
        plan: the committed plan.
        owners: the sequence of each of the plan's chunks.
        sequences: sequences of the plan's chunks and loads, by request id. A sequence that ends before the result gets
            no token from it, but its tenant is still charged for the device time.
        unpaid: for each chunk, the number of its tokens that are computed for the first time.
    """

    plan: StepPlan
    owners: tuple[Sequence, ...]
    sequences: Mapping[str, Sequence]
    unpaid: tuple[int, ...]

    @property
    def awaiting(self) -> Iterator[Sequence]:
        """Sequences whose next token this step samples, including those that have ended since."""
        return (seq for chunk, seq in zip(self.plan.chunks, self.owners, strict=True) if chunk.samples)


def follow(plan: StepPlan, live: Mapping[str, Sequence]) -> StepUnderWay:
    """Return the `StepUnderWay` of a plan that is being committed, before anything of it is computed. `live` has the
    sequences of all live requests, by request id."""
    owners = [live[chunk.request_id] for chunk in plan.chunks]
    unpaid = [
        _unpaid(chunk, seq) if seq.num_paid else chunk.num_tokens
        for chunk, seq in zip(plan.chunks, owners, strict=True)
    ]
    sequences = {seq.id: seq for seq in (*owners, *(live[load.request_id] for load in plan.loads))}
    return StepUnderWay(plan, tuple(owners), sequences, tuple(unpaid))


def _unpaid(chunk: ScheduledChunk, seq: Sequence) -> int:
    return min(chunk.num_tokens, max(0, chunk.start + chunk.num_tokens - seq.num_paid))
