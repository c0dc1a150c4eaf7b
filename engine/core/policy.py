"""Who goes first and who makes room: pure functions over state, gathered behind `Policy` so that they can be exchanged.

The planner decides nothing about order; a policy decides nothing about pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Protocol

from engine.core.batching import may_form_batch
from engine.core.config import Scheduling
from engine.core.fair_order import fair_order
from engine.core.fair_share import displaceable, within_shares
from engine.core.sequence import Sequence
from engine.core.state import EngineState
from engine.core.types import AdapterId, Lane
from engine.core.victims import cheapest_first


class Policy(Protocol):
    """The questions a plan asks, in the order it asks them."""

    timed: bool
    """Steps are bounded by predicted time, not by tokens alone."""
    gathers: bool
    """Sequences start together, those included whose prompt has to wait for a later step."""

    def order_running(self, state: EngineState, lane: Lane) -> list[Sequence]:
        """A lane's running sequences, the first to be given tokens and pages first."""

    def order_waiting(self, state: EngineState, lane: Lane, now: float) -> Iterable[Sequence]:
        """A lane's waiting sequences, the first to be started first."""

    def order_fetches(self, state: EngineState, lane: Lane, now: float) -> Iterable[Sequence]:
        """The same, with those who may not start yet: whose adapter is read first."""

    def victims(self, state: EngineState, needy: Sequence) -> Iterable[Sequence]:
        """Running sequences that may be preempted for `needy`, the first to go first."""


class LanePolicy:
    """Interactive before batch; inside a lane decodes before prefills, short prompts before long ones, and tenants by
    what they have been given.

    A waiting sequence takes room from lower lanes, where the sequences that give most for least yield first, and a
    waiting interactive one then from tenants of its lane that hold more than their share. A running sequence that must
    grow takes room from lower lanes first, then from the sequences behind it within the shares of the tenants, itself
    last, so that the head of the line always finishes.
    """

    timed, gathers = True, False

    def order_running(self, state: EngineState, lane: Lane) -> list[Sequence]:
        running = [seq for seq in state.running.values() if seq.lane is lane]
        if lane is not Lane.INTERACTIVE:
            return decodes_first(by_adapter(running))
        long = state.config.long_prompt
        return sorted(decodes_first(running), key=lambda seq: seq.num_remaining > long)

    def order_waiting(self, state: EngineState, lane: Lane, now: float) -> Iterable[Sequence]:
        return fair_order(state, lane, now)

    order_fetches = order_waiting

    def victims(self, state: EngineState, needy: Sequence) -> Iterable[Sequence]:
        yield from cheapest_first(state, [s for s in state.running.values() if s.lane > needy.lane])
        if needy.id not in state.running:
            yield from displaceable(state, needy) if needy.lane is Lane.INTERACTIVE else ()
        elif needy.lane is Lane.INTERACTIVE:
            yield from within_shares(state, needy, behind(state, needy))
        else:
            yield from behind(state, needy)


class QueuePolicy:
    """One queue in a fixed order, one static token budget: first come first served, shortest job first, or priority,
    depending on the order its queue was made with. Only growth preempts, and whoever is last in the queue goes."""

    timed, gathers = False, False

    def order_running(self, state: EngineState, lane: Lane) -> list[Sequence]:
        return decodes_first(seq for seq in state.running.values() if seq.lane is lane)

    def order_waiting(self, state: EngineState, lane: Lane, now: float) -> Iterable[Sequence]:
        return (seq for queue in state.waiting.groups(lane).values() for seq in queue)

    order_fetches = order_waiting

    def victims(self, state: EngineState, needy: Sequence) -> list[Sequence]:
        return behind(state, needy) if needy.id in state.running else []


class Batched:
    """Any policy, with starts held back until a batch has been gathered and the one before it has ended."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.timed, self.gathers = False, True
        self.order_running = policy.order_running
        self.order_fetches = policy.order_fetches
        self.victims = policy.victims

    def order_waiting(self, state: EngineState, lane: Lane, now: float) -> Iterable[Sequence]:
        return self._policy.order_waiting(state, lane, now) if may_form_batch(state, now) else ()


def make_policy(scheduling: Scheduling) -> Policy:
    """What the configuration asks for."""
    policy: Policy = LanePolicy() if scheduling.policy == "lanes" else QueuePolicy()
    return policy if scheduling.scheduler == "continuous" else Batched(policy)


def decodes_first(running: Iterable[Sequence]) -> list[Sequence]:
    """In the order they began to run."""
    decodes: list[Sequence] = []
    prefills: list[Sequence] = []
    for seq in running:
        (decodes if seq.num_computed + 1 == len(seq.tokens) + seq.num_pending else prefills).append(seq)
    return decodes + prefills


def by_adapter(running: Iterable[Sequence]) -> Iterable[Sequence]:
    """The oldest, with all that share its adapter, then the oldest of the others: a step that has no room for all reads
    fewer adapters for as many rows."""
    groups: dict[AdapterId | None, list[Sequence]] = {}
    for seq in running:
        groups.setdefault(seq.request.adapter, []).append(seq)
    return chain.from_iterable(groups.values())


def behind(state: EngineState, needy: Sequence) -> list[Sequence]:
    """Those of the lane at or behind `needy` in the order they would wait in, the last first."""
    key = state.waiting.order.key
    own = key(needy)
    others = [s for s in state.running.values() if s.lane is needy.lane and key(s) >= own]
    return sorted(others, key=key, reverse=True)
