"""The scheduling policy: in which order sequences are served, and which ones are preempted. A policy consists of pure
functions over the state behind the `Policy` protocol. It decides nothing about pages, and the planner nothing about
order. Engines serve by `LanePolicy`; the policies that it is compared with are in `lab.sim.baselines`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Listed
from itertools import chain
from typing import Protocol

from engine.core.messages.requests import AdapterHash, Lane
from engine.core.policy.fair_order import fair_order
from engine.core.policy.fair_share import displaceable, within_shares
from engine.core.policy.preemption import cheapest_first
from engine.core.state.engine_state import EngineState
from engine.core.state.sequence import Sequence


class Policy(Protocol):
    """Scheduling policy of an engine: tells the planner in which order sequences get tokens, start, have their adapters
    fetched and are preempted. Implementations read the state and do not change it. `now` is in seconds on the engine's
    clock."""

    timed: bool
    """True means that steps are bounded by predicted time, and not only by tokens."""
    gathers: bool
    """True means that sequences start together, including those whose prompt gets no tokens before a later step."""

    def order_running(self, state: EngineState, lane: Lane) -> tuple[list[Sequence], list[Sequence]]:
        """Return a lane's running sequences in the order in which they get tokens and pages: first those that decode,
        then those in their prompts."""

    def order_ahead(self, state: EngineState, lane: Lane, now: float, prompts: Listed[Sequence]) -> Iterable[Sequence]:
        """Return the waiting sequences of a lane that start before its running `prompts` (at least one) advance, in the
        order in which they should start."""

    def order_waiting(self, state: EngineState, lane: Lane, now: float) -> Iterable[Sequence]:
        """Return the waiting sequences of a lane that may start now, in the order in which they should start."""

    def order_fetches(self, state: EngineState, lane: Lane, now: float) -> Iterable[Sequence]:
        """Return all waiting sequences of a lane, including those that `order_waiting` holds back, in the order in
        which their adapters should be fetched and their grammars prepared."""

    def victims(self, state: EngineState, needy: Sequence) -> Iterable[Sequence]:
        """Yield the running sequences that may be preempted so that `needy`, waiting or running, gets room, in order of
        preemption. If `needy` itself is reached, the search for victims ends."""


class LanePolicy:
    """The policy of engines: the interactive lane is served before the batch lane. Within a lane, running decodes go
    before prefills; waiting requests start by `fair_order`: first those of tenants that have received less service, or
    batch requests by deadline while deadlines press.

    Running interactive prompts go by the service that their tenants have received, too, those that are long last, and
    after waiting requests of tenants that have received less than all of them. A tenant's long prompts would otherwise
    take each step before another tenant's next chat, which then waited for whole prompts: 1.2 s in place of 0.2.

    A waiting sequence takes room from lower lanes, whose sequences are preempted in order of the least cost per gain. A
    waiting interactive sequence then takes room from tenants of its lane that hold more than their share. A running
    sequence that must grow takes room from lower lanes first and then from the sequences behind it, in the interactive
    lane within the shares of the tenants. The growing sequence itself is the last victim, so that the sequence at the
    head of the order always finishes.
    """

    timed, gathers = True, False

    def order_running(self, state: EngineState, lane: Lane) -> tuple[list[Sequence], list[Sequence]]:
        running = [seq for seq in state.running.values() if seq.lane is lane]
        if lane is not Lane.INTERACTIVE:
            return split_running(by_adapter(running))
        decodes, prompts = split_running(running)
        long = state.config.long_prompt

        def turn(seq: Sequence) -> tuple[bool, float, float]:
            return seq.num_remaining > long, seq.account.tenant.served, seq.account.served

        return decodes, sorted(prompts, key=turn)

    def order_ahead(self, state: EngineState, lane: Lane, now: float, prompts: Listed[Sequence]) -> Iterable[Sequence]:
        if lane is not Lane.INTERACTIVE:
            return ()
        return fair_order(state, lane, now, min(seq.account.tenant.served for seq in prompts))

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


def split_running(running: Iterable[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
    """Return the sequences that decode (one token left to compute) and those in their prompts, in the given order."""
    decodes: list[Sequence] = []
    prefills: list[Sequence] = []
    for seq in running:
        (decodes if seq.num_computed + 1 == len(seq.tokens) + seq.num_pending else prefills).append(seq)
    return decodes, prefills


def by_adapter(running: Iterable[Sequence]) -> Iterable[Sequence]:
    """Return the sequences grouped by adapter, in the order of each adapter's first sequence, so that a step that has
    no room for all of them reads fewer adapters."""
    groups: defaultdict[AdapterHash | None, list[Sequence]] = defaultdict(list)
    for seq in running:
        groups[seq.request.adapter_hash].append(seq)
    return chain.from_iterable(groups.values())


def behind(state: EngineState, needy: Sequence) -> list[Sequence]:
    """Return `needy` and the running sequences of its lane that come after it by the sort key of the waiting queue, the
    last first: the order in which they are preempted if `needy` must grow."""
    key = state.waiting.order.key
    own = key(needy)
    others = [s for s in state.running.values() if s.lane is needy.lane and key(s) >= own]
    return sorted(others, key=key, reverse=True)
