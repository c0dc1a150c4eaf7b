"""Fairness between the tenants of a lane, and between the classes of a tenant's requests: virtual token counters,
charged in measured device time.

After Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): the tenant that was served least goes
first. A tenant that returns gets at least the smallest counter of the waiting tenants, so that idle time earns no
credit. The counters count device seconds divided by weight, not tokens, so that long contexts and adapters are charged
at their cost.

A party is a tenant or, where a tenant has classes of requests, one of its classes. Classes have counters of their own,
which decide only which of a tenant's classes goes next; each charge also counts for the tenant (hierarchical sharing,
after Bennett and Zhang, "Hierarchical Packet Fair Queueing Algorithms", SIGCOMM 1996). A tenant's share therefore does
not depend on the classes that it uses, in whichever order, and a class that goes on alone is not held back for what it
was charged beside a heavier one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field
from math import exp
from typing import NamedTuple

from engine.core.messages.requests import Lane, Request, tenant_of

RECENT_S = 10.0
"""Seconds for which a sender counts as active after a request, because people read the answer before they send
another."""
LIGHT = 0.5
"""Share of its fair part of a lane's requests up to which a party counts as light. At 1, parties that send alike would
take turns as soon as one of them has a request more."""


class RecentSenders:
    """Remembers the two senders that were active last, in constant time and memory, which is enough to know whether
    there is more than one. A sender is a tenant or, in the scheduler, a party."""

    def __init__(self) -> None:
        self._came: dict[str, float] = {}
        """When each of the two senders was active last, in seconds on the engine's clock, the older first."""

    @property
    def newest(self) -> str:
        """Sender (a tenant or one of its classes of requests) that was active last; an empty string means that no
        request has come."""
        return next(reversed(self._came), "")

    def note(self, sender: str, now: float) -> None:
        """Record that a request of `sender` arrived or ended at `now` (seconds on the engine's clock), and forget all
        but the last two senders."""
        self._came[sender] = max(now, self._came.pop(sender, now))
        if len(self._came) > 2:
            del self._came[next(iter(self._came))]

    def has_other(self, sender: str, now: float) -> bool:
        """Return whether a sender other than `sender` was active within `RECENT_S` seconds before `now`."""
        return any(other != sender and now - came <= RECENT_S for other, came in self._came.items())

    def since(self, now: float) -> list[str]:
        """Return those of the two senders that were active within `RECENT_S` seconds before `now`."""
        return [sender for sender, came in self._came.items() if now - came <= RECENT_S]


class Imbalance(NamedTuple):
    """Which parties of a lane are heavy beside light ones (see `Accounts.imbalance`)."""

    heavy: Set[str]
    """Names of the parties that are not light."""
    light_share: float
    """The light parties' part, from 0 to 1, of the weights of all parties of the lane."""


@dataclass(slots=True)
class TenantAccount:
    """Device time that one tenant was charged in one lane since the engine started, with its weight and virtual
    counter."""

    name: str
    weight: float = 1.0
    served: float = 0.0
    """The virtual counter: device seconds divided by weight, raised when the tenant returns after a pause."""
    parties: dict[str, Account] = field(default_factory=dict)
    """Accounts of the tenant's classes, by party."""
    last_left: float = 0.0
    """Counter of the class that last left the queue (see `Accounts.leave`): the minimum for classes that arrive while
    none waits."""


@dataclass(slots=True)
class Account:
    """Device time that one party (a tenant or, where a tenant has classes of requests, one of its classes) was charged
    in one lane since the engine started, with its weights and virtual counter."""

    tenant: TenantAccount
    weight: float = 1.0
    """The part of the tenant's weight that the party has while it has requests in the lane. The parts of the tenant's
    parties with requests sum to the tenant's weight."""
    class_weight: float = 1.0
    live: int = 0
    """Number of the party's requests in the lane, waiting or running."""
    served: float = 0.0
    """The virtual counter among the tenant's classes: device seconds divided by `class_weight`, raised when the class
    returns after a pause."""
    seconds: float = 0.0
    """Device seconds that were charged to the party, including tokens that were computed again after a preemption."""
    _lately: float = 0.0
    _lately_at: float = 0.0
    """Tokens of answers that the party had lately, as of this time on the engine's clock; see `lately`."""

    def charge(self, seconds: float, billed: float) -> None:
        """Charge `seconds` of device time to the party. Only `billed` of them, which leave out tokens computed again
        after a preemption, are added to the virtual counters of the party and its tenant, divided by weight."""
        self.seconds += seconds
        self.served += billed / self.class_weight
        self.tenant.served += billed / self.tenant.weight

    def note_token(self, now: float, window: float) -> None:
        """Count a token of an answer, at `now` on the engine's clock; see `lately`."""
        if now != self._lately_at:
            self._lately, self._lately_at = self.lately(now, window), now
        self._lately += 1.0

    def lately(self, now: float, window: float) -> float:
        """Return the number of tokens of answers that the party had lately, where one counts e times less for each
        `window` seconds that have passed since."""
        return self._lately * exp(min(0.0, self._lately_at - now) / window)


class Accounts:
    """Device time that parties (tenants or, where a tenant has classes of requests, its classes) were charged, by lane,
    with the virtual counters of fair scheduling. Only `commit/` and the ledger change them."""

    def __init__(self) -> None:
        self.of: dict[tuple[Lane, str], Account] = {}
        """Accounts of parties, by lane and party."""
        self.tenants: dict[tuple[Lane, str], TenantAccount] = {}
        self._last_left = dict.fromkeys(Lane, 0.0)
        self._live: dict[Lane, dict[str, Account]] = {lane: {} for lane in Lane}
        """Parties with requests in each lane, waiting or running."""
        self._recent = {lane: RecentSenders() for lane in Lane}

    def get(self, lane: Lane, party: str) -> Account:
        account = self.of.get((lane, party))
        if account is None:
            name = tenant_of(party)
            tenant = self.tenants.setdefault((lane, name), TenantAccount(name))
            account = self.of[lane, party] = tenant.parties[party] = Account(tenant)
        return account

    def arrive(self, request: Request, waiting: Collection[str]) -> None:
        """Record the arrival and the weights of a new request. If its tenant has no other waiting request, the tenant's
        virtual counter, if lower, is raised to the smallest counter of the waiting tenants or, if none waits, of the
        tenant that last left the queue. The counter of its class is raised among the tenant's classes in the same way.

        Args:
            waiting: parties with waiting requests in the request's lane, the new request not included.
        """
        lane, party = request.lane, request.party
        self._recent[lane].note(party, request.arrival)
        account = self._live[lane][party] = self.get(lane, party)
        tenant = account.tenant
        tenant.weight, account.class_weight = request.weight, request.class_weight
        account.live += 1
        _weigh(tenant)
        if party in waiting:
            return
        others = [self.get(lane, other) for other in waiting]
        classes = [other.served for other in others if other.tenant is tenant]
        account.served = max(account.served, min(classes, default=tenant.last_left))
        if not classes:
            least = min((other.tenant.served for other in others), default=self._last_left[lane])
            tenant.served = max(tenant.served, least)

    def leave(self, lane: Lane, party: str, waiting: Iterable[str]) -> None:
        """Record that a party (a tenant or one of its classes) has no waiting requests in the lane any more. Its
        virtual counter becomes the minimum for a class of the same tenant that arrives while no class of it waits. If
        no other party of the tenant is in `waiting`, the tenant's counter becomes the minimum for a tenant that arrives
        while no tenant waits in the lane. `arrive` applies both minimums, so that idle time earns no credit."""
        account = self.get(lane, party)
        account.tenant.last_left = account.served
        if not any(other in account.tenant.parties for other in waiting):
            self._last_left[lane] = account.tenant.served

    def end(self, request: Request, now: float) -> None:
        """Record that a request has ended at `now` (seconds on the engine's clock). If its party has no other request
        in the lane, the tenant's weight is divided anew among the tenant's parties that have."""
        lane, party = request.lane, request.party
        self._recent[lane].note(party, now)
        account = self.get(lane, party)
        account.live -= 1
        if not account.live:
            self._live[lane].pop(party, None)
            _weigh(account.tenant)

    def is_shared(self, lane: Lane, now: float) -> bool:
        """Return whether a lane is in use by at least two parties: those with requests in it, and those of which a
        request arrived or ended within `RECENT_S` seconds before `now`."""
        live, recent = self._live[lane], self._recent[lane]
        return len(live) > 1 or any(recent.has_other(party, now) for party in (*live, recent.newest))

    def imbalance(self, lane: Lane, now: float) -> Imbalance | None:
        """Return which parties of a lane are heavy, if any party is light: one with at most the share `LIGHT` of its
        fair part of the lane's requests, waiting and running. Parties of which a request arrived or ended within
        `RECENT_S` seconds before `now` count as present without requests."""
        parties = self._live[lane]
        if absent := [party for party in self._recent[lane].since(now) if party not in parties]:
            parties = parties | {party: self.get(lane, party) for party in absent}
        if len(parties) < 2:
            return None
        weights = _weights(parties) if absent else {party: account.weight for party, account in parties.items()}
        whole = sum(weights.values())
        part = LIGHT * sum([account.live for account in parties.values()]) / whole
        heavy = {party for party, account in parties.items() if account.live > part * weights[party]}
        if not 0 < len(heavy) < len(parties):
            return None
        return Imbalance(heavy, 1 - sum([weights[party] for party in heavy]) / whole)

    def gap(self, lane: Lane, waiting: Iterable[str]) -> float:
        """Return the service gap of a lane for the statistics: the largest difference between the virtual counters of
        the tenants of the parties in `waiting`, in device seconds divided by weight; 0 if there are none."""
        counters = [self.get(lane, party).tenant.served for party in waiting]
        return max(counters) - min(counters) if counters else 0.0


def _weights(parties: Mapping[str, Account]) -> dict[str, float]:
    """Return the weights of parties by name, where each tenant's is divided among those of its parties that are in
    `parties`, although some may have no requests."""
    whole = defaultdict[str, float](float)
    for account in parties.values():
        whole[account.tenant.name] += account.class_weight
    return {
        party: account.tenant.weight * account.class_weight / whole[account.tenant.name]
        for party, account in parties.items()
    }


def _weigh(tenant: TenantAccount) -> None:
    """Divide the weight of a tenant among those of its parties that have requests, in proportion to their class
    weights."""
    live = [account for account in tenant.parties.values() if account.live]
    whole = sum(account.class_weight for account in live)
    for account in live:
        account.weight = tenant.weight * account.class_weight / whole
