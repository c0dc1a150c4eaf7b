"""The order in which a lane's waiting requests are offered to the planner: fair between tenants and their classes,
then by locality.

Virtual token counters (fairness/accounts.py) decide which tenant goes first, and then which of its classes. Among those
whose counters are less than a quantum apart, and among the first few requests of a class, requests go first whose
adapter is resident and whose prefix is cached (after Cao et al., "Locality-aware Fair Scheduling in LLM Serving",
2025). While batch deadlines press, batch requests go by deadline instead.

All orders are lazy iterators: the planner stops when the step is full, so that a queue of ten thousand requests costs
only as much as the requests that are looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Set
from heapq import heapify, heappop, heappush
from itertools import islice
from math import inf

from engine.core.messages.requests import Lane, tenant_of
from engine.core.policy.fair_share import LaneShares
from engine.core.state.engine_state import EngineState
from engine.core.state.sequence import Sequence, page_keys

HARVEST_BELOW = 0.7
"""While batch deadlines need less than this share of the device time that batch work has been getting, they do not
affect the order of batch work, because grouping by adapter and prefix is worth more."""
QUANTUM_S = 0.05
"""Difference between the virtual counters of two tenants, in device seconds divided by weight, below which locality (a
resident adapter, a cached prefix) decides which tenant goes first. It is small beside a request's cost and large beside
a step's."""
LOCALITY_WINDOW = 8
"""Number of a tenant's first waiting requests that are compared by locality."""
LOCALITY_SHARE = 0.5
"""After this share of its lane's TTFT goal, or after `adapter_age_s` if that is less, the first request in the window
is no longer passed over for requests with better locality. Measured on two cores, with 32 concurrent chats over 1,000
adapters, when the limit was `adapter_age_s`: requests whose adapter was in host memory waited 1.9 s in the median, and
the others 0.5 s."""


def fair_order(state: EngineState, lane: Lane, now: float, below: float = inf) -> Iterator[Sequence]:
    """Yield the waiting sequences of a lane, or those of tenants whose counter is less than `below`, in the order in
    which they should start at `now` (seconds on the engine's clock): by the counters of their tenants and classes, then
    by locality. While batch deadlines press (`BatchTime.need` is at least `HARVEST_BELOW`), batch sequences with a
    deadline come first, the earliest deadline first."""
    pressing = lane is not Lane.INTERACTIVE and state.ledger.batch.need >= HARVEST_BELOW
    if not pressing:
        yield from _by_tenant(state, lane, now, below)
        return
    yield from state.waiting.urgent
    yield from (seq for seq in _by_tenant(state, lane, now, inf) if seq.request.deadline is None)


def _by_tenant(state: EngineState, lane: Lane, now: float, below: float) -> Iterator[Sequence]:
    """Yield the waiting sequences of a lane's tenants whose counter is less than `below` in fair order: between
    tenants, and within each between its classes."""
    get, waiting = state.ledger.accounts.get, state.waiting.groups(lane)
    groups = (
        waiting if below == inf else {p: queue for p, queue in waiting.items() if get(lane, p).tenant.served < below}
    )
    if len(groups) < 2:
        for queue in groups.values():
            yield from _local_first(state, queue, now)
        return
    turns = _Turns(state, lane)
    heap = [turns.entry(party) for party in groups]
    heapify(heap)
    queues: dict[str, Iterator[Sequence]] = {}
    while heap:
        entry = heappop(heap)
        party = entry[-1]
        if entry != (newer := turns.entry(party)):  # another class of the tenant was given something meanwhile
            heappush(heap, newer)
            continue
        if party not in queues:
            queues[party] = _local_first(state, groups[party], now)
        seq = next(queues[party], None)
        if seq is not None:
            yield seq
            turns.charge(party, state.ledger.token_prices.of(len(seq.tokens), 0))
            heappush(heap, turns.entry(party))


Entry = tuple[bool, int, int, int, float, str, int, int, int, float, str]
"""Sort key of a party, the lowest first: whether its tenant can get no slot (see `_full`), the tenant's counter in
whole quanta, running sequences (see `_holding`), negated locality, exact counter and name, and then the same five
values of the party itself."""


class _Turns:
    """Sort keys of a lane's parties (tenants or their classes) while one plan is made. They include the seconds that
    the plan has given to each party so far: parties are charged only after the step, and the plan must not give
    everything to one of them."""

    def __init__(self, state: EngineState, lane: Lane) -> None:
        self._accounts, self._lane = state.ledger.accounts, lane
        self._holding = _holding(state, lane)
        self._full = _full(state, lane) if self._holding else frozenset()
        self._held: Counter[str] = Counter()
        """Numbers of sequences, as `_holding` counts them, by tenant."""
        for party, count in self._holding.items():
            self._held[tenant_of(party)] += count
        self._local = {party: _locality(state, queue[0]) for party, queue in state.waiting.groups(lane).items()}
        self._most_local: dict[str, int] = {}
        """By tenant, the best locality among the first waiting requests of its classes."""
        for party, local in self._local.items():
            name = tenant_of(party)
            if local >= self._most_local.get(name, 0):
                self._most_local[name] = local
        self._given: dict[str, float] = {}
        """Seconds that the plan has given to each party."""
        self._given_to: dict[str, float] = {}
        """Seconds that the plan has given to each tenant."""

    def entry(self, party: str) -> Entry:
        account = self._accounts.get(self._lane, party)
        tenant = account.tenant
        served = tenant.served + self._given_to.get(tenant.name, 0.0) / tenant.weight
        own = account.served + self._given.get(party, 0.0) / account.class_weight
        held, holding = self._held.get(tenant.name, 0), self._holding.get(party, 0)  # a Counter's own default is slow
        place = tenant.name in self._full, int(served / QUANTUM_S), held, -self._most_local[tenant.name], served
        return *place, tenant.name, int(own / QUANTUM_S), holding, -self._local[party], own, party

    def charge(self, party: str, seconds: float) -> None:
        name = tenant_of(party)
        self._given[party] = self._given.get(party, 0.0) + seconds
        self._given_to[name] = self._given_to.get(name, 0.0) + seconds


def _full(state: EngineState, lane: Lane) -> Set[str]:
    """Return the tenants of a lane that would exceed their fair share of the slots or pages with one more sequence, so
    that none can start while all slots are taken. They go last: a tenant whose running sequences wait, for slow masks,
    is charged little, and its waiting requests would end the search for one that can start."""
    shares = LaneShares(state, lane)
    full = set()
    for name, group in shares.tenants().items():
        pages = sum(map(shares.num_pages, group.held))
        if group.held and shares.level(group.weight, len(group.held) + 1, pages) > shares.fair:
            full.add(name)
    return full


def _holding(state: EngineState, lane: Lane) -> Counter[str]:
    """Return the number of running sequences of a lane by party if all slots are taken, and no counts otherwise. A
    party is a tenant or one of its classes of requests. If all slots are taken, only a party within its fair share can
    get one. The counts sort parties with fewer running sequences before others whose virtual counters are equally low:
    those would be tried in vain, which would end the search."""
    if len(state.running) < state.config.max_seqs:
        return Counter()
    return Counter(seq.request.party for seq in state.running.values() if seq.lane is lane)


def _local_first(state: EngineState, queue: Iterable[Sequence], now: float) -> Iterator[Sequence]:
    """Yield a party's waiting requests, each chosen among the next `LOCALITY_WINDOW` in order: the one with the best
    locality among those at least as urgent (by priority) as the first, or the first itself if it has waited too long or
    was preempted."""
    rest = iter(queue)
    window = list(islice(rest, LOCALITY_WINDOW))
    while window:
        longest = LOCALITY_SHARE * state.config.goals[window[0].lane].ttft_s
        patience = min(state.config.scheduling.adapter_age_s, longest)
        chosen = _most_local(state, window, now - patience)
        yield window.pop(chosen)
        window.extend(islice(rest, 1))


def _most_local(state: EngineState, window: list[Sequence], old: float) -> int:
    head = window[0]
    if head.request.arrival <= old or head.preempted.times:
        return 0
    best, best_score = 0, _locality(state, head)
    for index, seq in enumerate(window):
        if best_score == 2:
            break
        if seq.request.priority <= head.request.priority and (score := _locality(state, seq)) > best_score:
            best, best_score = index, score
    return best


def _locality(state: EngineState, seq: Sequence) -> int:
    """Return the rank of a waiting sequence by what the device already has of it (higher goes first): 0 if its adapter
    is not resident, 2 if its first page is cached too, and otherwise 1. A sequence without an adapter counts as one
    whose adapter is resident."""
    if seq.request.adapter_hash and not state.adapters[seq.request.adapter_hash].is_resident:
        return 0
    size = state.config.block_size
    if not state.config.prefix_caching or len(seq.tokens) <= size:
        return 1
    return 1 + any(key in state.prefix.page_of for key in page_keys(seq, 1, size))
