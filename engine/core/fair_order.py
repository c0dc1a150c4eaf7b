"""The order in which a lane's waiting requests are offered to the planner: fair between tenants and their classes,
then by locality.

Virtual token counters (accounts.py) decide which tenant goes first, and then which of its classes. Among those whose
counters are less than a quantum apart, and among the first few requests of a class, requests go first whose adapter is
resident and whose prefix is cached (after Cao et al., "Locality-aware Fair Scheduling in LLM Serving", 2025). While
batch deadlines press, batch requests go by deadline instead.

All orders are lazy iterators: the planner stops when the step is full, so that a queue of ten thousand requests costs
only as much as the requests that are looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import NamedTuple

from engine.core.prefix import page_keys
from engine.core.sequence import Sequence
from engine.core.state import EngineState
from engine.core.types import Lane, tenant_of


def fair_order(state: EngineState, lane: Lane, now: float) -> Iterator[Sequence]:
    """Yield the waiting sequences of a lane in the order in which they should start at `now` (seconds on the engine's
    clock): by the counters of their tenants and classes, then by locality. While batch deadlines press, batch sequences
    with a deadline come first, the earliest deadline first."""
    pressing = lane is not Lane.INTERACTIVE and state.ledger.need >= state.config.scheduling.harvest_below
    if not pressing:
        yield from _by_tenant(state, lane, now)
        return
    yield from state.waiting.urgent
    yield from (seq for seq in _by_tenant(state, lane, now) if seq.request.deadline is None)


def _by_tenant(state: EngineState, lane: Lane, now: float) -> Iterator[Sequence]:
    """Yield the waiting sequences of a lane in fair order: between tenants, and within each between its classes."""
    groups = state.waiting.groups(lane)
    if len(groups) == 1:
        yield from _local_first(state, next(iter(groups.values())), now)
        return
    accounts, holding = state.ledger.accounts, _holding(state, lane)
    classes: dict[str, list[_Contender]] = {}
    for party, waiting in groups.items():
        account, queue = accounts.get(lane, party), _local_first(state, waiting, now)
        one = _Contender(party, account.served, account.class_weight, holding[party], waiting[0], queue)
        classes.setdefault(account.tenant.name, []).append(one)
    held: Counter[str] = Counter()
    for party, count in holding.items():
        held[tenant_of(party)] += count
    tenants = []
    for name, rivals in classes.items():
        tenant, first = accounts.tenants[lane, name], min(rivals, key=lambda one: one.served)
        tenants.append(_Contender(name, tenant.served, tenant.weight, held[name], first.head, _merged(state, rivals)))
    yield from _merged(state, tenants)


class _Contender(NamedTuple):
    """A tenant among the tenants of a lane, or a class among the classes of a tenant, with waiting sequences."""

    name: str
    served: float
    weight: float
    holding: int
    """See `_holding`."""
    head: Sequence
    """The sequence whose locality decides between contenders with almost the same counter."""
    queue: Iterator[Sequence]


def _merged(state: EngineState, contenders: list[_Contender]) -> Iterator[Sequence]:
    """Yield the sequences of all contenders, next each time that of the contender with the lowest counter."""
    if len(contenders) == 1:
        yield from contenders[0].queue
        return
    ledger, quantum = state.ledger, state.config.scheduling.quantum_s or 1e-9

    def entry(index: int, served: float) -> tuple[int, int, int, float, str, int]:
        one = contenders[index]
        return int(served / quantum), one.holding, -_locality(state, one.head), served, one.name, index

    heap = [entry(index, one.served) for index, one in enumerate(contenders)]
    heapify(heap)
    while heap:
        *_, served, _, index = heappop(heap)
        seq = next(contenders[index].queue, None)
        if seq is not None:
            yield seq
            # The contender is charged after the step; until then the plan must not give it everything.
            heappush(heap, entry(index, served + ledger.price(len(seq.tokens), 0) / contenders[index].weight))


def _holding(state: EngineState, lane: Lane) -> Counter[str]:
    """Return how many sequences of a lane each party runs if all slots are taken, and no counts otherwise. If all
    slots are taken, only a tenant or class within its share can take one. One that has just returned has the same
    counter as the others, so that without these counts another could be tried first, fail, and end the search."""
    if len(state.running) < state.config.max_seqs:
        return Counter()
    return Counter(seq.request.party for seq in state.running.values() if seq.lane is lane)


def _local_first(state: EngineState, queue: Iterable[Sequence], now: float) -> Iterator[Sequence]:
    """Yield a party's waiting requests: each time, of the next `locality_window` in order, the one with the best
    locality of those with at least the first one's priority, or the first if it waited too long or was preempted."""
    rules, rest = state.config.scheduling, iter(queue)
    window = list(islice(rest, rules.locality_window))
    while window:
        patience = min(rules.adapter_age_s, rules.locality_share * state.config.goals[window[0].lane].ttft_s)
        chosen = _most_local(state, window, now - patience)
        yield window.pop(chosen)
        window.extend(islice(rest, 1))


def _most_local(state: EngineState, window: list[Sequence], old: float) -> int:
    head = window[0]
    if head.request.arrival <= old or head.num_preemptions:
        return 0
    best, best_score = 0, _locality(state, head)
    for index, seq in enumerate(window):
        if best_score == 2:
            break
        if seq.request.priority <= head.request.priority and (score := _locality(state, seq)) > best_score:
            best, best_score = index, score
    return best


def _locality(state: EngineState, seq: Sequence) -> int:
    """Return 0 if a sequence's adapter is not resident, 2 if its first page is cached too, and otherwise 1. A sequence
    without an adapter counts as one whose adapter is resident."""
    if seq.request.adapter_hash and not state.adapters[seq.request.adapter_hash].is_resident:
        return 0
    size = state.config.block_size
    if not state.config.prefix_caching or len(seq.tokens) <= size:
        return 1
    return 1 + any(key in state.prefix.page_of for key in page_keys(seq, 1, size))
