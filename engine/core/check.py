"""The integrity check: callable between any two steps, says in words what is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from engine.core.adapters import Residency
from engine.core.pages import NULL_PAGE
from engine.core.state import EngineState
from engine.core.types import PageId


def violations(state: EngineState) -> list[str]:
    """Everything that must hold and does not; an empty list is a healthy engine."""
    return [*_pages(state), *_prefix(state), *_host(state), *_sequences(state), *_adapters(state)]


def leftovers(state: EngineState) -> list[str]:
    """What an engine without requests still holds and should not: pages, pins, queue entries."""
    held = sum(1 for refs in state.pool.refs if refs) - sum(len(a.pages) for a in state.adapters.values())
    pins = [a.id for a in state.adapters.values() if a.running or a.live]
    found = {"pages": held, "sequences": len(state.sequences), "adapter pins": len(pins)}
    return [f"{count} {what} left" for what, count in found.items() if count]


def _pages(state: EngineState) -> Iterator[str]:
    owners: Counter[PageId] = Counter(page for seq in state.sequences.values() for page in seq.pages)
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
    for key, request_id in prefix.promised.items():
        if request_id not in state.running:
            yield f"page {key.hex()} is promised by {request_id}, which does not run"


def _host(state: EngineState) -> Iterator[str]:
    host = state.host
    if {page: key for key, page in host.page_of.items()} != host.key_of:
        yield "the host tier's two maps disagree"
    if len(host.free) + len(host.key_of) != host.num_pages or host.free.keys() & host.key_of.keys():
        yield "host pages were lost or are in two places"


def _sequences(state: EngineState) -> Iterator[str]:
    config = state.config
    waiting = [seq.id for seq in state.waiting]
    if sorted([*waiting, *state.running]) != sorted(state.sequences):
        yield "waiting and running sequences are not the live ones"
    yield from _queue(state)
    if len(state.running) > config.max_seqs:
        yield f"{len(state.running)} sequences run and {config.max_seqs} may"
    for seq in state.running.values():
        if len(seq.pages) < config.pages_for(seq.num_computed) or seq.num_computed > len(seq.tokens):
            yield f"sequence {seq.id} has computed more than its pages or tokens hold"
    for seq in state.waiting:
        if seq.pages or seq.num_computed:
            yield f"waiting sequence {seq.id} holds pages"


def _queue(state: EngineState) -> Iterator[str]:
    queue = state.waiting
    for groups in queue.lanes.values():
        for waiting in groups.values():
            if not waiting or waiting != sorted(waiting, key=queue.order.key):
                yield "the waiting queue is out of order"
    if len(queue) != sum(1 for _ in queue):
        yield "the waiting queue has lost count"
    if sum(queue.num_tokens.values()) != sum(len(seq.tokens) for seq in queue):
        yield "the waiting queue has lost count of its tokens"


def _adapters(state: EngineState) -> Iterator[str]:
    live = Counter(seq.request.adapter for seq in state.sequences.values())
    running = Counter(seq.request.adapter for seq in state.running.values())
    for adapter in state.adapters.values():
        if (adapter.live, adapter.running) != (live[adapter.id], running[adapter.id]):
            yield f"adapter {adapter.id} counts {adapter.live} live and {adapter.running} running sequences"
        if adapter.running and adapter.residency is not Residency.RESIDENT:
            yield f"adapter {adapter.id} is used by a running sequence and is {adapter.residency.value}"
        if bool(adapter.pages) != (adapter.residency is not Residency.HOST):
            yield f"adapter {adapter.id} is {adapter.residency.value} with {len(adapter.pages)} pages"
    if state.adapter_pages != sum(len(adapter.pages) for adapter in state.adapters.values()):
        yield f"adapters are said to hold {state.adapter_pages} pages, and do not"
    if unknown := {a for a in live if a is not None} - set(state.adapters):
        yield f"sequences use unknown adapters {sorted(unknown)}"
