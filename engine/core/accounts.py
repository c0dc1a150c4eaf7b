"""Fairness between the parties of a lane: virtual token counters, charged in measured device time.

A party is a tenant or, where a tenant has classes of requests, one of its classes. After Sheng et al., "Fairness in
Serving Large Language Models" (OSDI 2024): the party that was served least goes first. A party that returns gets at
least the smallest counter of the waiting parties, so that idle time earns no credit. The counters count device seconds
divided by weight, not tokens, so that long contexts and adapters are charged at their cost.

Classes divide the weight of their tenant: a class's weight is the tenant's, times its own over the sum of those of the
tenant's classes that have requests in the lane. A tenant's share therefore does not depend on how many classes it uses,
and a class without requests leaves its part to the tenant's other classes (hierarchical sharing, after Bennett and
Zhang, "Hierarchical Packet Fair Queueing Algorithms", SIGCOMM 1996).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from engine.core.recent import RecentSenders
from engine.core.types import Lane, Request


@dataclass(slots=True)
class Account:
    """Device time charged to one party in one lane since the engine started, with its weight and virtual counter."""

    tenant: str = ""
    weight: float = 1.0
    """Weight of the party: the tenant's, or the part of it that its class has."""
    class_weight: float = 1.0
    live: int = 0
    """Number of the party's requests in the lane, waiting or running."""
    served: float = 0.0
    """The virtual counter: device seconds divided by weight, raised when the party returns after a pause."""
    seconds: float = 0.0
    """Device seconds that were charged to the party, including tokens that were computed again after a preemption."""


class Accounts:
    """Accounts of all parties by lane. Only `commit.py`, `apply.py` and the ledger change them."""

    def __init__(self) -> None:
        self.of: dict[tuple[Lane, str], Account] = {}
        self._live: dict[tuple[Lane, str], dict[str, Account]] = {}
        """Accounts of the parties with requests, by lane and tenant, and then by party."""
        self._last_left = dict.fromkeys(Lane, 0.0)
        self._recent = {lane: RecentSenders() for lane in Lane}

    def get(self, lane: Lane, party: str) -> Account:
        account = self.of.get((lane, party))
        if account is None:
            account = self.of[lane, party] = Account()
        return account

    def arrive(self, request: Request, waiting: Collection[str]) -> None:
        """Record the arrival and the weights of a new request. If its party has no other waiting request, its counter,
        if lower, is raised to the smallest counter of the waiting parties or, if none waits, of the party that last
        left the queue.

        Args:
            waiting: parties with waiting requests in the request's lane, the new request not included.
        """
        lane, party = request.lane, request.party
        self._recent[lane].note(party, request.arrival)
        account = self.get(lane, party)
        account.tenant, account.class_weight = request.tenant, request.class_weight
        account.live += 1
        self._live.setdefault((lane, request.tenant), {})[party] = account
        self._weigh(lane, request.tenant, request.weight)
        if party in waiting:
            return
        least = min((self.get(lane, other).served for other in waiting), default=self._last_left[lane])
        account.served = max(account.served, least)

    def leave(self, lane: Lane, party: str) -> None:
        """Record that the last waiting request of a party started to run or ended. The party's present counter becomes
        the minimum for parties that arrive while none waits."""
        self._last_left[lane] = self.get(lane, party).served

    def end(self, request: Request) -> None:
        """Record that a request has ended. The tenant's other classes divide the weight of a class without requests."""
        lane, tenant, account = request.lane, request.tenant, self.get(request.lane, request.party)
        account.live -= 1
        if account.live:
            return
        classes = self._live[lane, tenant]
        whole = sum(other.weight for other in classes.values())
        del classes[request.party]
        if classes:
            self._weigh(lane, tenant, whole)
        else:
            del self._live[lane, tenant]

    def _weigh(self, lane: Lane, tenant: str, weight: float) -> None:
        """Divide the weight of a tenant among those of its classes that have requests."""
        classes = self._live[lane, tenant].values()
        whole = sum(account.class_weight for account in classes)
        for account in classes:
            account.weight = weight * account.class_weight / whole

    def is_shared(self, lane: Lane, waiting: Collection[str], now: float) -> bool:
        """Return whether a lane is in use by at least two parties: those in `waiting`, and those that have sent a
        request within `RECENT_S` seconds before `now`."""
        recent = self._recent[lane]
        return len(waiting) > 1 or any(recent.has_other(party, now) for party in (*waiting, recent.newest))

    def gap(self, lane: Lane, waiting: Iterable[str]) -> float:
        """Return the largest difference between the counters of the parties in `waiting`, in device seconds divided by
        weight; 0 if there are none."""
        counters = [self.get(lane, party).served for party in waiting]
        return max(counters) - min(counters) if counters else 0.0
