"""Which running sequences of a lane make room for another tenant of the same lane: those beyond their tenant's share.

Dominant resource fairness (Ghodsi et al., NSDI 2011) over sequence slots and pages: a tenant holds the larger of its
fraction of the slots and its fraction of the pages, divided by its weight. The fair level is 1 over the sum of the
weights of all tenants that run or wait in the lane. A tenant that stays within the fair level takes room from tenants
above it. Without this rule, a tenant whose answers fill every slot makes the others wait until one of its answers ends:
17 s in place of 0.4 s with 64 answers of 200 tokens on two CPU cores.

A tenant that is alone may use everything. No tenant loses its last sequence, and none is brought below the fair level
by more than one sequence, so that two tenants never displace each other in turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set

from engine.core.sequence import Sequence
from engine.core.state import EngineState
from engine.core.victims import cheapest_first


def displaceable(state: EngineState, needy: Sequence) -> Iterator[Sequence]:
    """Yield the running sequences that make room for a waiting one, from the tenant that is farthest above its share,
    the cheapest to preempt first."""
    running = _running_by_tenant(state, needy)
    fair = _fair_level(state, needy, running)
    own = running.pop(needy.request.tenant, [])
    if own and _level(state, [*own, needy]) > fair:
        return
    queues = {tenant: cheapest_first(state, held) for tenant, held in running.items() if len(held) > 1}
    while queues:
        tenant = max(queues, key=lambda tenant: _level(state, queues[tenant]))
        if _level(state, queues[tenant]) <= fair:
            return
        yield queues[tenant].pop(0)
        if len(queues[tenant]) == 1:
            del queues[tenant]


def crowding(state: EngineState, seq: Sequence) -> Set[str]:
    """Return the other tenants of a sequence's lane that hold more than their share, or have more waiting. Where the
    sequence's own tenant runs others, there are none: it is one of them."""
    running = _running_by_tenant(state, seq)
    own = running.pop(seq.request.tenant, [])
    if not running or any(other is not seq for other in own):
        return frozenset()
    fair, waiting = _fair_level(state, seq, running), state.waiting.groups(seq.lane)
    return {tenant for tenant, held in running.items() if tenant in waiting or _level(state, held) > fair}


def _fair_level(state: EngineState, seq: Sequence, running: Mapping[str, list[Sequence]]) -> float:
    tenants = {seq.request.tenant, *running, *state.waiting.groups(seq.lane)}
    return 1.0 / sum(_weight(state, seq, tenant) for tenant in tenants)


def _running_by_tenant(state: EngineState, needy: Sequence) -> dict[str, list[Sequence]]:
    running: dict[str, list[Sequence]] = {}
    for seq in state.running.values():
        if seq.lane is needy.lane:
            running.setdefault(seq.request.tenant, []).append(seq)
    return running


def _weight(state: EngineState, needy: Sequence, tenant: str) -> float:
    return state.ledger.accounts.get(needy.lane, tenant).weight


def _level(state: EngineState, held: list[Sequence]) -> float:
    """Return the dominant share of one tenant's sequences over its weight. Pages that several share count for each."""
    config = state.config
    pages = sum(max(len(seq.pages), config.pages_for(len(seq.tokens))) for seq in held)
    share = max(len(held) / config.max_seqs, pages / max(1, config.usable_pages - state.adapter_pages))
    return share / _weight(state, held[0], held[0].request.tenant)
