"""Scheduling policies: in which order sequences are served, and which ones are preempted.

A policy consists of pure functions over the state behind the `Policy` protocol, so that policies are interchangeable.
The planner decides nothing about order, and a policy decides nothing about pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Protocol

from engine.core.config import Scheduling
from engine.core.fair_order import fair_order
from engine.core.fair_share import displaceable, within_shares
from engine.core.sequence import Sequence
from engine.core.state import EngineState
from engine.core.types import AdapterHash, Lane
from engine.core.victims import cheapest_first


class Policy(Protocol):
    """Decisions about order that a plan asks for."""

    timed: bool
    """True means that steps are bounded by predicted time, and not only by tokens."""
    gathers: bool
    """True means that sequences start together, including those whose prompt has to wait for a later step."""

    def order_running(self, state: EngineState, lane: Lane) -> list[Sequence]:
        """Return a lane's running sequences in the order in which they get tokens and pages."""

    def order_waiting(self, state: EngineState, lane: Lane, now: float) -> Iterable[Sequence]:
        """Return the waiting sequences of a lane that may start now, in the order in which they should start."""

    def order_fetches(self, state: EngineState, lane: Lane, now: float) -> Iterable[Sequence]:
        """Return all waiting sequences of a lane in the same order, in which adapters are fetched and grammars are
        prepared. This includes sequences that may not start yet."""

    def victims(self, state: EngineState, needy: Sequence) -> Iterable[Sequence]:
        """Return the running sequences that may be preempted for `needy`, in order of preemption."""


class LanePolicy:
    """The default policy: the interactive lane is served before the batch lane. Within a lane, decodes go before
    prefills, short prompts before long ones, and tenants that have received less service before others.

    A waiting sequence takes room from lower lanes, whose sequences are preempted in order of the least cost per gain. A
    waiting interactive sequence then takes room from tenants of its lane that hold more than their share. A running
    sequence that must grow takes room from lower lanes first and then from the sequences behind it, in the interactive
    lane within the shares of the tenants. The growing sequence itself is the last victim, so that the sequence at the
    head of the order always finishes.
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
    """A single queue in a fixed order with a static token budget per step, for comparison.

    The order is that of the waiting queue: first come first served, shortest job first, or priority. Only a running
    sequence that must grow preempts others, and the last sequence in the order is preempted first.
    """

    timed, gathers = False, False

    def order_running(self, state: EngineState, lane: Lane) -> list[Sequence]:
        return decodes_first(seq for seq in state.running.values() if seq.lane is lane)

    def order_waiting(self, state: EngineState, lane: Lane, now: float) -> Iterable[Sequence]:
        return (seq for queue in state.waiting.groups(lane).values() for seq in queue)

    order_fetches = order_waiting

    def victims(self, state: EngineState, needy: Sequence) -> list[Sequence]:
        return behind(state, needy) if needy.id in state.running else []


class Batched:
    """Wraps a policy: no sequence starts until the previous batch has ended and a new batch has been gathered."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.timed, self.gathers = False, True
        self.order_running = policy.order_running
        self.order_fetches = policy.order_fetches
        self.victims = policy.victims

    def order_waiting(self, state: EngineState, lane: Lane, now: float) -> Iterable[Sequence]:
        return self._policy.order_waiting(state, lane, now) if may_form_batch(state, now) else ()


def make_policy(scheduling: Scheduling) -> Policy:
    """Return the policy that the configuration selects."""
    policy: Policy = LanePolicy() if scheduling.policy == "lanes" else QueuePolicy()
    return policy if scheduling.scheduler == "continuous" else Batched(policy)


def decodes_first(running: Iterable[Sequence]) -> list[Sequence]:
    """Return the sequences with decodes before prefills, and otherwise in the given order."""
    decodes: list[Sequence] = []
    prefills: list[Sequence] = []
    for seq in running:
        (decodes if seq.num_computed + 1 == len(seq.tokens) + seq.num_pending else prefills).append(seq)
    return decodes + prefills


def by_adapter(running: Iterable[Sequence]) -> Iterable[Sequence]:
    """Group the sequences by adapter, in the order of each adapter's first sequence.

    A step that has no room for all of them then reads fewer adapters for the same number of rows.
    """
    groups: dict[AdapterHash | None, list[Sequence]] = {}
    for seq in running:
        groups.setdefault(seq.request.adapter_hash, []).append(seq)
    return chain.from_iterable(groups.values())


def behind(state: EngineState, needy: Sequence) -> list[Sequence]:
    """Return `needy` and the running sequences of its lane that are behind it in the waiting order, the last first."""
    key = state.waiting.order.key
    own = key(needy)
    others = [s for s in state.running.values() if s.lane is needy.lane and key(s) >= own]
    return sorted(others, key=key, reverse=True)


STATIC_WINDOWS = 20
"""Maximum wait of a static batch for more requests, in windows. Otherwise the last requests of a run, too few for a
full batch, would never start."""


def may_form_batch(state: EngineState, now: float) -> bool:
    """Return whether a new batch may start: nothing runs, and a full batch waits or the oldest request has waited for
    its window."""
    if state.running or not len(state.waiting):
        return False
    rules = state.config.scheduling
    window = rules.window_s * (STATIC_WINDOWS if rules.scheduler == "static" else 1)
    oldest = min(queue[0].request.arrival for lane in state.waiting.lanes.values() for queue in lane.values())
    return len(state.waiting) >= state.config.max_seqs or now - oldest >= window
