"""How tenants share the slots and pages of a lane, and which running sequences make room for another tenant.

Dominant resource fairness (Ghodsi et al., NSDI 2011): a tenant's level is the larger of its fraction of the slots and
its fraction of the pages, divided by its weight. The fair level is 1 over the sum of the weights of all tenants that
run or wait in the lane. A tenant that stays within the fair level takes room from tenants above it. Without this rule,
a tenant whose answers fill every slot makes the others wait until one of its answers ends: 17 s in place of 0.4 s with
64 answers of 200 tokens on two CPU cores.

A tenant that is alone may use everything. No newcomer takes a tenant's last sequence, and no tenant is brought below
the fair level by more than one sequence. A sequence that grows keeps to the same shares: a tenant above the fair level
takes no pages from a tenant within it, because the two would otherwise preempt each other in turns.
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
    """Snapshot of the slots and pages that the tenants of a lane hold, made for one decision. `fair` is the fair level,
    1 over the sum of the weights of the tenants that run or wait in the lane."""

    def __init__(self, state: EngineState, lane: Lane) -> None:
        self._config = state.config
        self._pages = max(1, state.config.usable_pages - state.adapter_pages)
        self._waiting = state.waiting.groups(lane)
        self.held: dict[str, list[Sequence]] = {}
        """Running sequences of the lane, by tenant."""
        for seq in state.running.values():
            if seq.lane is lane:
                self.held.setdefault(seq.request.tenant, []).append(seq)
        accounts = state.ledger.accounts
        self._weights = {tenant: accounts.get(lane, tenant).weight for tenant in (*self.held, *self._waiting)}
        self.fair = 1.0 / (sum(self._weights.values()) or 1.0)

    def level(self, tenant: str, slots: int, pages: int) -> float:
        """Return the level that a tenant would have with the given numbers of slots and KV pages: the larger of its
        fractions of all slots and of all pages without adapters, divided by its weight."""
        return max(slots / self._config.max_seqs, pages / self._pages) / self._weights.get(tenant, 1.0)

    def level_of(self, tenant: str, held: Listed[Sequence]) -> float:
        return self.level(tenant, len(held), sum(map(self.num_pages, held)))

    def num_pages(self, seq: Sequence) -> int:
        """Return the number of pages that a sequence holds, or needs for its known tokens if that is more. A page that
        several sequences share counts for each of them."""
        return max(len(seq.pages), self._config.pages_for(len(seq.tokens)))

    def above(self) -> Set[str]:
        """Return the tenants whose running sequences put them above the fair level."""
        return {tenant for tenant, held in self.held.items() if self.level_of(tenant, held) > self.fair}

    @cached_property
    def crowding(self) -> Set[str]:
        """Tenants that are above the fair level, or that have both running and waiting sequences in the lane."""
        return self.above() | (self.held.keys() & self._waiting.keys())

    def is_only_request(self, seq: Sequence) -> bool:
        """Return whether a sequence is the only one of its tenant in the lane, running or waiting."""
        tenant = seq.request.tenant
        return all(other is seq for other in (*self.held.get(tenant, ()), *self._waiting.get(tenant, ())[:2]))


def displaceable(state: EngineState, needy: Sequence) -> Iterator[Sequence]:
    """Yield the running sequences of other tenants in the lane that may be preempted for the waiting sequence `needy`:
    of the tenant that is then farthest above the fair level, the cheapest to preempt first, but never a tenant's last
    one. There are none if `needy` would bring its own tenant above that level, unless the tenant runs no other and it
    was preempted fewer than `max_preemptions` times."""
    shares = LaneShares(state, needy.lane)
    tenant = needy.request.tenant
    own = shares.held.pop(tenant, [])
    is_too_much = shares.level_of(tenant, [*own, needy]) > shares.fair
    # A tenant's first sequence may exceed the share, but not after it has been preempted too often.
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
    `needy`. If its tenant is above the fair level, these are the victims whose tenants are above it, too; otherwise all
    victims, those first. The given order is kept within both groups."""
    shares = LaneShares(state, needy.lane)
    if len(shares.held) < 2:
        return victims
    above = shares.above()
    if needy.request.tenant in above:
        return [seq for seq in victims if seq.request.tenant in above]
    return sorted(victims, key=lambda seq: seq.request.tenant not in above)
