"""How tenants share the slots and pages of a lane, and which running sequences make room for another tenant.

Dominant resource fairness (Ghodsi et al., NSDI 2011): a tenant's level is the larger of its fraction of the slots and
its fraction of the pages, divided by its weight. The fair level is 1 over the sum of the weights of all tenants that
run or wait in the lane. A tenant that stays within the fair level takes room from tenants above it. Without this rule,
a tenant whose answers fill every slot makes the others wait until one of its answers ends: 17 s in place of 0.4 s with
64 answers of 200 tokens on two CPU cores.

A tenant that is alone may use everything. No newcomer takes a tenant's last sequence, and no tenant is brought below
the fair level by more than one sequence. The classes of a tenant share what the tenant has by the same rules. The word
party stands for a tenant or, where a tenant has classes, for one of its classes (see fairness/accounts.py). A sequence
that grows keeps to the same shares: a party above the fair level takes no pages from a party within it, because the two
would otherwise preempt each other in turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from collections.abc import Sequence as Listed
from functools import cached_property
from typing import NamedTuple

from engine.core.messages.requests import Lane, tenant_of
from engine.core.policy.preemption import MAX_PREEMPTIONS, cheapest_first
from engine.core.state.engine_state import EngineState
from engine.core.state.sequence import Sequence


class Group(NamedTuple):
    """The running sequences of a tenant, or of a party (one of its classes of requests), in a lane, and its weight."""

    weight: float
    held: list[Sequence]


class LaneShares:
    """Snapshot of the slots and pages that the parties of a lane (tenants or their classes of requests) hold, made for
    one decision. `fair` is the fair level, 1 over the sum of the weights of the parties that run or wait in the
    lane."""

    def __init__(self, state: EngineState, lane: Lane) -> None:
        self._config = state.config
        self._pages = max(1, state.config.usable_pages - state.adapter_pages)
        self._waiting = state.waiting.groups(lane)
        self.held: dict[str, list[Sequence]] = {}
        """Running sequences of the lane, by party."""
        for seq in state.running.values():
            if seq.lane is lane:
                self.held.setdefault(seq.request.party, []).append(seq)
        accounts = state.ledger.accounts
        self._weights = {party: accounts.get(lane, party).weight for party in (*self.held, *self._waiting)}
        self.fair = 1.0 / (sum(self._weights.values()) or 1.0)

    def parties(self, tenant: str) -> dict[str, Group]:
        """Return, by name, the parties of a tenant (the tenant itself or its classes) that have running or waiting
        sequences in the lane."""
        own = [party for party in self._weights if tenant_of(party) == tenant]
        return {party: Group(self._weights[party], self.held.get(party, [])) for party in own}

    def tenants(self) -> dict[str, Group]:
        """Return, by name, the tenants that have running or waiting sequences in the lane, each with the sum of its
        parties' weights."""
        found: dict[str, Group] = {}
        for party, weight in self._weights.items():
            whole, held = found.get(tenant_of(party), (0.0, []))
            found[tenant_of(party)] = Group(whole + weight, held + self.held.get(party, []))
        return found

    def level(self, weight: float, slots: int, pages: int) -> float:
        """Return the level (weighted dominant share) of a tenant or party with the given weight and numbers of slots
        and KV pages: the larger of its fractions of all slots and of all pages without adapters, divided by its
        weight."""
        return max(slots / self._config.max_seqs, pages / self._pages) / weight

    def level_of(self, weight: float, held: Listed[Sequence]) -> float:
        return self.level(weight, len(held), sum(map(self.num_pages, held)))

    def num_pages(self, seq: Sequence) -> int:
        """Return the number of pages that a sequence holds, or needs for its known tokens if that is more. A page that
        several sequences share counts for each of them."""
        return max(len(seq.pages), self._config.pages_for(len(seq.tokens)))

    @cached_property
    def above(self) -> Set[str]:
        """Names of the parties (tenants or their classes of requests) whose running sequences hold more than their
        weighted fair share of the slots or of the pages."""
        held = self.held.items()
        return {party for party, seqs in held if self.level_of(self._weights[party], seqs) > self.fair}

    @cached_property
    def crowding(self) -> Set[str]:
        """Names of the parties (tenants or their classes of requests) whose decodes a newcomer's prompt may delay:
        those that hold more than their fair share, or that have both running and waiting sequences in the lane."""
        return self.above | (self.held.keys() & self._waiting.keys())

    def is_only_request(self, seq: Sequence) -> bool:
        """Return whether a sequence is the only one of its party (tenant or class of requests) in the lane, running or
        waiting."""
        party = seq.request.party
        return all(other is seq for other in (*self.held.get(party, ()), *self._waiting.get(party, ())[:2]))


def displaceable(state: EngineState, needy: Sequence) -> Iterator[Sequence]:
    """Yield the running sequences of the lane that may be preempted for the waiting sequence `needy`, because their
    tenant or class holds more than its fair share: those of other tenants, and then those of its tenant's other
    classes."""
    shares, request = LaneShares(state, needy.lane), needy.request
    yield from _taken(state, shares, needy, shares.tenants(), request.tenant)
    yield from _taken(state, shares, needy, shares.parties(request.tenant), request.party)


def _taken(
    state: EngineState, shares: LaneShares, needy: Sequence, groups: dict[str, Group], name: str
) -> Iterator[Sequence]:
    """Yield the running sequences that may be preempted so that the group `name` (a tenant or a party) can run `needy`.
    Each is taken from the group that is then farthest above the fair level, and no group loses its last one. Within a
    group, sequences of parties above the fair level go first, and of these the cheapest to preempt. Yields none if
    `needy` would bring its own group above the fair level, unless the group runs no other and `needy` was preempted
    fewer than `MAX_PREEMPTIONS` times."""
    own = groups.pop(name)
    is_too_much = shares.level_of(own.weight, [*own.held, needy]) > shares.fair
    # A group's first sequence may exceed the share, but not after it has been preempted too often.
    if is_too_much and (own.held or needy.preempted.times >= MAX_PREEMPTIONS):
        return
    slots = {other: len(group.held) for other, group in groups.items() if len(group.held) > 1}
    pages = {other: sum(map(shares.num_pages, groups[other].held)) for other in slots}
    queues: dict[str, Iterator[Sequence]] = {}

    def level(other: str) -> float:
        return shares.level(groups[other].weight, slots[other], pages[other])

    while slots:
        other = max(slots, key=level)
        if level(other) <= shares.fair:
            return
        if other not in queues:
            cheapest = cheapest_first(state, groups[other].held)
            queues[other] = iter(sorted(cheapest, key=lambda seq: seq.request.party not in shares.above))
        victim = next(queues[other])
        yield victim
        slots[other] -= 1
        pages[other] -= shares.num_pages(victim)
        if slots[other] == 1:
            del slots[other]


def within_shares(state: EngineState, needy: Sequence, victims: list[Sequence]) -> list[Sequence]:
    """Return, filtered or reordered by the fair shares of their parties (tenants or their classes), the `victims` that
    may free pages for the running sequence `needy`. If its party is above the fair level, these are the victims whose
    parties are above it, too; otherwise all victims, those first. The given order is kept within both groups."""
    shares = LaneShares(state, needy.lane)
    if len(shares.held) < 2:
        return victims
    above = shares.above
    if needy.request.party in above:
        return [seq for seq in victims if seq.request.party in above]
    return sorted(victims, key=lambda seq: seq.request.party not in above)
