"""Integrity check of the engine state. It can be called between any two steps and describes each violation in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import isclose

from engine.core.memory.adapter_eviction import Held, worth_in_host, worth_on_device
from engine.core.memory.adapters import HostCopy
from engine.core.memory.pages import NULL_PAGE
from engine.core.messages.requests import PageId
from engine.core.state.engine_state import EngineState


def violations(state: EngineState) -> list[str]:
    """Return a description, in words, of each invariant of the engine state that is violated. An empty list means that
    the state is consistent."""
    return [
        *_pages(state),
        *_prefix(state),
        *_host(state),
        *_moves(state),
        *_sequences(state),
        *_accounts(state),
        *_adapters(state),
        *_tiers(state),
        *_grammars(state),
        *_masks(state),
    ]


def leftovers(state: EngineState) -> list[str]:
    """Return, in texts such as "2 pages left", what an engine without live requests should have freed: pages (except
    those of adapters), sequences, adapter users, fetches that were not cancelled, missing adapters, grammars, and
    sequences that wait for masks."""
    held = sum(1 for refs in state.pool.refs if refs) - sum(len(a.pages) for a in state.adapters.values())
    used = [a.adapter_hash for a in state.adapters.values() if a.running or a.live]
    wanted = [name for name in state.tiers.fetching if state.adapters[name].host is HostCopy.FETCHING]
    found = {
        "pages": held,
        "sequences": len(state.sequences),
        "users of adapters": len(used),
        "fetches": len(wanted),
        "missing adapters": len(state.tiers.missing),
        "grammars": len(state.grammars),
        "sequences that wait for masks": len(state.masks.waiting),
        "requests in accounts": sum(account.live for account in state.ledger.accounts.of.values()),
    }
    return [f"{count} {what} left" for what, count in found.items() if count]


def _pages(state: EngineState) -> Iterator[str]:
    owners: Counter[PageId] = Counter(page for seq in state.sequences.values() for page in seq.pages)
    owners.update(page for seq in state.sequences.values() for page in seq.drafting.pages)
    owners.update(page for adapter in state.adapters.values() for page in adapter.pages)
    pool = state.pool
    for page in range(1, pool.num_pages):
        if pool.refs[page] != owners[page]:
            yield f"page {page} counts {pool.refs[page]} references and has {owners[page]} owners"
        places = (pool.refs[page] > 0) + (page in pool.free) + state.prefix.is_idle(page)
        if places != 1:
            yield f"page {page} is in {places} of the states referenced, free and idle"
    if owners[NULL_PAGE] or NULL_PAGE in pool.free:
        yield "the null page was handed out"


def _prefix(state: EngineState) -> Iterator[str]:
    prefix = state.prefix
    if {page: key for key, page in prefix.page_of.items()} != prefix.key_of:
        yield "the prefix cache's two maps disagree"
    for page in prefix.key_of:
        if page in state.pool.free:
            yield f"page {page} is free and still findable as a prefix"
    for lane, pages in prefix.idle.items():
        for page in pages:
            if page not in prefix.key_of or prefix.lane_of[page] is not lane:
                yield f"page {page} is idle in lane {lane.name} and holds no prefix of it"
    if prefix.lane_of.keys() != prefix.key_of.keys():
        yield "the prefix cache knows lanes of pages it does not hold"
    for request_id in prefix.tails.values():
        seq = state.running.get(request_id)
        if seq is None or seq.num_computed < len(seq.request.prompt_ids) - 1:
            yield f"{request_id} offers the end of its prompt and has not computed it"
    for key, request_id in prefix.promised.items():
        if request_id not in state.running:
            yield f"page {key.hex()} is promised by {request_id}, which does not run"


def _host(state: EngineState) -> Iterator[str]:
    host = state.host
    if {page: key for key, page in host.page_of.items()} != host.key_of:
        yield "the host tier's two maps disagree"
    if sorted([*host.free, *host.key_of, *host.reserved]) != list(range(host.num_pages)):
        yield "host pages were lost or are in two places"
    saved = Counter(key for seq in state.sequences.values() for key in seq.page_keys[: seq.num_saved])
    if saved != host.needed:
        yield "the host tier keeps copies that no live sequence needs, or counts too few"
    if set(host.idle) != {key for key in host.page_of if key not in host.needed and key not in host.leased}:
        yield "the host tier's idle copies are not those that may be overwritten"


def _moves(state: EngineState) -> Iterator[str]:
    moves, host = state.moves, state.host
    if moves.leases() != host.leased:
        yield "host pages are leased to no export, or the other way round"
    if sorted(page for one in moves.imports.values() for page in one.pages.values()) != sorted(host.reserved):
        yield "host pages are reserved for no import, or the other way round"
    for key, number in moves.awaited.items():
        if number not in moves.imports or key not in moves.imports[number].pages:
            yield f"page {key.hex()} is awaited, and no import fetches it"


def _sequences(state: EngineState) -> Iterator[str]:
    config = state.config
    waiting = [seq.id for seq in state.waiting]
    if sorted([*waiting, *state.running]) != sorted(state.sequences):
        yield "waiting and running sequences are not the live ones"
    yield from _queue(state)
    if len(state.running) > config.max_seqs:
        yield f"{len(state.running)} sequences run and {config.max_seqs} may"
    for seq in state.running.values():
        computable = seq.num_tokens - bool(seq.num_pending)  # the newest pending token cannot be computed yet
        if len(seq.pages) < config.pages_for(seq.num_computed) or seq.num_computed > computable:
            yield f"sequence {seq.id} has computed more than its pages or tokens hold"
        if seq.drafting.num_held > len(seq.drafting.pages) * config.draft_block:
            yield f"the draft model holds more of sequence {seq.id} than its pages"
    for seq in state.waiting:
        if seq.pages or seq.num_computed or seq.drafting.pages:
            yield f"waiting sequence {seq.id} holds pages"
    yield from _pending(state)


def _pending(state: EngineState) -> Iterator[str]:
    chosen = Counter(seq.id for step in state.under_way for seq in step.awaiting if state.is_live(seq))
    for seq in state.sequences.values():
        if seq.num_pending != chosen[seq.id]:
            yield f"sequence {seq.id} waits for {seq.num_pending} tokens, and {chosen[seq.id]} are being chosen"


def _queue(state: EngineState) -> Iterator[str]:
    queue = state.waiting
    for groups in queue.lanes.values():
        for waiting in groups.values():
            if not waiting or waiting != sorted(waiting, key=queue.order.key):
                yield "the waiting queue is out of order"
    if len(queue) != sum(1 for _ in queue):
        yield "the waiting queue has lost count"
    if sum(queue.num_tokens.values()) != sum(seq.num_tokens for seq in queue):
        yield "the waiting queue has lost count of its tokens"


def _accounts(state: EngineState) -> Iterator[str]:
    live = Counter((seq.request.lane, seq.request.party) for seq in state.sequences.values())
    accounts = state.ledger.accounts
    if live != {place: account.live for place, account in accounts.of.items() if account.live}:
        yield "the accounts count other requests than live ones"
    for tenant in accounts.tenants.values():
        weights = [account.weight for account in tenant.parties.values() if account.live]
        if weights and not isclose(sum(weights), tenant.weight):
            yield f"the classes of tenant {tenant.name} have {sum(weights)} of its weight {tenant.weight}"


def _adapters(state: EngineState) -> Iterator[str]:
    live = Counter(seq.request.adapter_hash for seq in state.sequences.values())
    running = Counter(seq.request.adapter_hash for seq in state.running.values())
    for adapter in state.adapters.values():
        if (adapter.live, adapter.running) != (live[adapter.adapter_hash], running[adapter.adapter_hash]):
            yield f"adapter {adapter.adapter_hash} counts {adapter.live} live and {adapter.running} running sequences"
        if adapter.running and not adapter.is_resident:
            yield f"adapter {adapter.adapter_hash} is used by a running sequence and not on the device"
        if len(adapter.pages) not in (0, adapter.num_pages):
            yield f"adapter {adapter.adapter_hash} has {len(adapter.pages)} of {adapter.num_pages} pages"
    if unknown := {a for a in live if a is not None} - set(state.adapters):
        yield f"sequences use unknown adapters {sorted(unknown)}"


def _tiers(state: EngineState) -> Iterator[str]:
    """Yield the violations in `AdapterTiers`: the incrementally updated totals, orders and sets must equal a recount
    over all adapters (`fetching` may have fewer), and the totals must not exceed the configured capacities."""
    config, tiers, adapters = state.config, state.tiers, state.adapters.values()
    counted = Held(*map(sum, zip(Held(), *map(Held.by, adapters), strict=True)))
    if tiers.held != counted:
        yield f"adapters are said to hold {tiers.held}, and hold {counted}"
    if counted.host_bytes > config.host_adapter_bytes:
        yield f"adapters take {counted.host_bytes} bytes of host memory, of {config.host_adapter_bytes}"
    if counted.pages > config.adapter_pages or counted.adapter_slots > config.max_resident_adapters:
        yield f"{counted.adapter_slots} adapters take {counted.pages} pages, of {config.adapter_pages}"
    if counted.pinned_pages > config.adapter_pages:
        yield f"pinned adapters need {counted.pinned_pages} pages, of {config.adapter_pages}"
    expected = {
        "idle": sorted(
            (worth_on_device(a), a.adapter_hash) for a in adapters if a.pages and not (a.running or a.pinned)
        ),
        "hosted": sorted((worth_in_host(a), a.adapter_hash) for a in adapters if a.host is HostCopy.PRESENT),
    }
    for name, order in expected.items():
        if list(getattr(tiers, name)) != [adapter_hash for _, adapter_hash in order]:
            yield f"{name} adapters are not in order of what they are worth"
    if set(tiers.missing) != {a.adapter_hash for a in adapters if a.is_missing}:
        yield "adapters to be fetched are not the missing ones"
    if not set(tiers.fetching) <= {
        a.adapter_hash for a in adapters if a.host in (HostCopy.FETCHING, HostCopy.CANCELLED)
    }:
        yield "an adapter is in host memory, or not wanted there, and still being fetched"
    if set(tiers.closing) != {a.adapter_hash for a in adapters if a.closing}:
        yield "adapters on their way out are not those that were dropped"


def _grammars(state: EngineState) -> Iterator[str]:
    needed = Counter(grammar for seq in state.sequences.values() if (grammar := seq.request.params.grammar))
    if needed != state.grammars.live():
        yield "grammars are counted that no sequence needs, or the other way round"
    if state.grammars.memory.total != sum(state.grammars.charges().values()):
        yield "tenants are charged for other grammars than the prepared ones"
    for seq in state.running.values():
        if state.grammars.blocks(seq.request.params.grammar):
            yield f"sequence {seq.id} runs before its grammar is ready"


def _masks(state: EngineState) -> Iterator[str]:
    masks = state.masks
    for request_id, seq in masks.waiting.items():
        if state.running.get(request_id) is not seq or not seq.masks_slowly:
            yield f"sequence {request_id} waits for a mask and does not run"
        if masks.under_way.get(request_id) is seq:
            yield f"sequence {request_id} waits for a mask that is under way"
