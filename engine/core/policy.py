"""Who goes first and who makes room: pure functions over state, gathered behind `Policy` so that they can be exchanged.

The planner decides nothing about order; a policy decides nothing about pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from engine.core.state import EngineState
from engine.core.types import Lane, Sequence

QueueKey = tuple[Lane, int, float, str]


def queue_key(seq: Sequence) -> QueueKey:
    """Lane, then priority (lower is sooner), then arrival. A preempted sequence keeps its arrival, and so its place."""
    return (seq.request.lane, seq.request.priority, seq.request.arrival, seq.id)


class Policy(Protocol):
    """The questions a plan asks, in the order it asks them."""

    def token_budget(self, state: EngineState, now: float) -> int:
        """Tokens this step may compute."""

    def order_running(self, state: EngineState, lane: Lane) -> list[Sequence]:
        """A lane's running sequences, the first to be given tokens and pages first."""

    def order_waiting(self, state: EngineState, lane: Lane, now: float) -> Iterable[Sequence]:
        """A lane's waiting sequences, the first to be started first. Nobody is started past one that finds no room."""

    def victims(self, state: EngineState, needy: Sequence) -> list[Sequence]:
        """Running sequences that may be preempted for `needy`, the first to go first."""


class LanePolicy:
    """Interactive before batch; inside a lane decodes before prefills, and first come first served.

    A waiting sequence takes room only from a strictly lower lane. A running one that must grow takes it from whoever
    stands behind it, itself last, so that the head of the line always finishes.
    """

    def token_budget(self, state: EngineState, now: float) -> int:
        return state.config.token_budget

    def order_running(self, state: EngineState, lane: Lane) -> list[Sequence]:
        running = (seq for seq in state.running.values() if seq.request.lane is lane)
        return sorted(running, key=lambda seq: (seq.num_remaining > 1, queue_key(seq)))

    def order_waiting(self, state: EngineState, lane: Lane, now: float) -> Iterable[Sequence]:
        return (seq for seq in state.waiting if seq.request.lane is lane)

    def victims(self, state: EngineState, needy: Sequence) -> list[Sequence]:
        key, lane = queue_key(needy), needy.request.lane
        if needy.id in state.running:
            behind = [s for s in state.running.values() if queue_key(s) >= key]
        else:
            behind = [s for s in state.running.values() if s.request.lane > lane]
        return sorted(behind, key=queue_key, reverse=True)
