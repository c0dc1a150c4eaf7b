"""How parties share the slots and pages of a lane, and which running sequences make room for another party.

A party is a tenant or, where a tenant has classes of requests, one of its classes (see accounts.py). Dominant resource
fairness (Ghodsi et al., NSDI 2011): a party's level is the larger of its fraction of the slots and its fraction of the
pages, divided by its weight. The fair level is 1 over the sum of the weights of all parties that run or wait in the
lane. A party that stays within the fair level takes room from parties above it. Without this rule, a tenant whose
answers fill every slot makes the others wait until one of its answers ends: 17 s in place of 0.4 s with 64 answers of
200 tokens on two CPU cores.

A party that is alone may use everything. No newcomer takes a party's last sequence, and no party is brought below the
fair level by more than one sequence. A sequence that grows keeps to the same shares: a party above the fair level takes
no pages from a party within it, because the two would otherwise preempt each other in turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from collections.abc import Sequence as Listed
from functools import cached_property

from engine.core.sequence import Sequence
from engine.core.state import EngineState
from engine.core.types import Lane
from engine.core.victims import cheapest_first


class LaneShares:
    """Snapshot of the slots and pages that the parties of a lane hold, made for one decision. `fair` is the fair level,
    1 over the sum of the weights of the parties that run or wait in the lane."""

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

    def level(self, party: str, slots: int, pages: int) -> float:
        """Return the level that a party would have with the given numbers of slots and KV pages: the larger of its
        fractions of all slots and of all pages without adapters, divided by its weight."""
        return max(slots / self._config.max_seqs, pages / self._pages) / self._weights.get(party, 1.0)

    def level_of(self, party: str, held: Listed[Sequence]) -> float:
        return self.level(party, len(held), sum(map(self.num_pages, held)))

    def num_pages(self, seq: Sequence) -> int:
        """Return the number of pages that a sequence holds, or needs for its known tokens if that is more. A page that
        several sequences share counts for each of them."""
        return max(len(seq.pages), self._config.pages_for(len(seq.tokens)))

    def above(self) -> Set[str]:
        """Return the parties whose running sequences put them above the fair level."""
        return {party for party, held in self.held.items() if self.level_of(party, held) > self.fair}

    @cached_property
    def crowding(self) -> Set[str]:
        """Tenants that are above the fair level, or that have both running and waiting sequences in the lane."""
        return self.above() | (self.held.keys() & self._waiting.keys())

    def is_only_request(self, seq: Sequence) -> bool:
        """Return whether a sequence is the only one of its party in the lane, running or waiting."""
        party = seq.request.party
        return all(other is seq for other in (*self.held.get(party, ()), *self._waiting.get(party, ())[:2]))


def displaceable(state: EngineState, needy: Sequence) -> Iterator[Sequence]:
    """Yield the running sequences of other parties in the lane that may be preempted for the waiting sequence `needy`:
    of the party that is then farthest above the fair level, the cheapest to preempt first, but never a party's last
    one. There are none if `needy` would bring its own party above that level, unless the party runs no other and it
    was preempted fewer than `max_preemptions` times."""
    shares = LaneShares(state, needy.lane)
    party = needy.request.party
    own = shares.held.pop(party, [])
    is_too_much = shares.level_of(party, [*own, needy]) > shares.fair
    # A party's first sequence may exceed the share, but not after it has been preempted too often.
    if is_too_much and (own or needy.num_preemptions >= state.config.scheduling.max_preemptions):
        return
    slots = {other: len(held) for other, held in shares.held.items() if len(held) > 1}
    pages = {other: sum(map(shares.num_pages, shares.held[other])) for other in slots}
    queues: dict[str, Iterator[Sequence]] = {}
    while slots:
        other = max(slots, key=lambda name: shares.level(name, slots[name], pages[name]))
        if shares.level(other, slots[other], pages[other]) <= shares.fair:
            return
        if other not in queues:
            queues[other] = iter(cheapest_first(state, shares.held[other]))
        victim = next(queues[other])
        yield victim
        slots[other] -= 1
        pages[other] -= shares.num_pages(victim)
        if slots[other] == 1:
            del slots[other]


def within_shares(state: EngineState, needy: Sequence, victims: list[Sequence]) -> list[Sequence]:
    """Return, filtered or reordered according to the shares, the `victims` that may free pages for the running sequence
    `needy`. If its party is above the fair level, these are the victims whose parties are above it, too; otherwise all
    victims, those first. The given order is kept within both groups."""
    shares = LaneShares(state, needy.lane)
    if len(shares.held) < 2:
        return victims
    above = shares.above()
    if needy.request.party in above:
        return [seq for seq in victims if seq.request.party in above]
    return sorted(victims, key=lambda seq: seq.request.party not in above)
