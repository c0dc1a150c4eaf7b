"""Changes to the engine state by moves of KV pages between engines (see messages/moves.py)."""

from __future__ import annotations

from engine.core.memory.moves import MOST_IMPORTS, KvExport, KvImport
from engine.core.messages.moves import (
    CancelFetch,
    EndExport,
    ExportOver,
    ExportPages,
    FetchEnd,
    FetchEnded,
    FetchPages,
    MoveReport,
    PagesCame,
    PagesReady,
    PagesSent,
)
from engine.core.messages.requests import PrefixKey
from engine.core.messages.step import StepPlan
from engine.core.state.engine_state import EngineState
from engine.core.state.sequence import Sequence, page_keys


def begin_import(state: EngineState, seq: Sequence, num_tokens: int) -> None:
    """Begin to fetch the full pages of a request's first `num_tokens` tokens that this engine neither has nor awaits,
    from another engine (its `kv_source`), as far as host pages can be reserved for them. `seq` need not be known to the
    state."""
    source, moves = seq.request.kv_source, state.moves
    if source is None or not (moves.is_on and state.host.num_pages):
        return
    keys = _missing(state, page_keys(seq, num_tokens // state.config.block_size, state.config.block_size))
    if not keys:
        return
    room = min(len(keys), state.movable_pages) if len(moves.imports) < MOST_IMPORTS else 0
    pages = state.host.reserve(room)
    if not pages:
        state.counters.kv.fetches[FetchEnd.BUSY] += 1
        return
    moves.num_begun += 1
    fetch = KvImport(seq.id, seq.request.arrival + source.seconds, 0, dict(zip(keys, pages, strict=False)))
    moves.imports[moves.num_begun] = fetch
    for key in fetch.pages:
        moves.awaited.setdefault(key, moves.num_begun)
    order = FetchPages(moves.num_begun, source, fetch.deadline, tuple(fetch.pages), tuple(pages))
    moves.outbox.append(order)


def hurry_imports(state: EngineState, seq: Sequence) -> None:
    """Limit how long a request that was just submitted waits for fetches of its KV from another engine that began
    before its submission: until `KvSource.seconds` of its own source after its arrival, or the fetch's deadline if that
    is earlier."""
    source = seq.request.kv_source
    for fetch in state.moves.imports.values():
        if source is not None and fetch.request_id == seq.id:
            fetch.deadline = min(fetch.deadline, seq.request.arrival + source.seconds)


def cancel_imports(state: EngineState, request_id: str) -> None:
    """End the fetches of KV pages from other engines for a request. Pages that have come stay; host pages of the others
    are freed once the mover has answered."""
    for number, fetch in state.moves.imports.items():
        if fetch.request_id == request_id and not fetch.is_cancelled:
            fetch.is_cancelled = True
            _stop_awaiting(state, number, fetch)
            state.moves.outbox.append(CancelFetch(number))


def take_report(state: EngineState, report: MoveReport) -> None:
    """Apply a report of the mover, which transfers KV pages between engines: pages that came or were sent, a fetch that
    ended, an export that begins or ends."""
    moves = state.moves
    match report:
        case PagesCame(number, count):
            _receive(state, number, moves.imports[number], count)
        case FetchEnded(number, end, seconds):
            fetch = moves.imports.pop(number)
            _stop_awaiting(state, number, fetch)
            state.host.unreserve(fetch.pages.values())
            state.counters.kv.fetches[end] += 1
            state.counters.kv.seconds_in += seconds
            if seconds:
                moves.come = moves.come[0] / 2 + fetch.num_come, moves.come[1] / 2 + seconds
        case ExportPages(number, keys, waits):
            moves.exports[number] = KvExport(keys, waits)
        case PagesSent(number, count):
            export = moves.exports[number]
            state.host.end_lease(export.keys[export.num_sent : export.num_sent + count])
            export.num_sent += count
            state.counters.kv.pages_out += count
        case EndExport(number):
            export = moves.exports.pop(number)
            state.host.end_lease(export.keys[export.num_sent : export.num_leased])


def lease_exports(state: EngineState, plan: StepPlan) -> None:
    """Lease the host copies that a plan makes available to exports (KV pages that other engines fetch), so that they
    are not overwritten before they are sent. The plan's saves must have been entered in the host tier before."""
    for number, count in plan.kept.exports:
        export = state.moves.exports[number]
        for key in export.keys[export.num_leased : count]:
            state.host.lease(key)
        export.num_leased = count


def offer_pages(state: EngineState, plan: StepPlan) -> None:
    """Tell the mover which KV pages are ready to be sent to other engines (exports) now that `plan` has run, and which
    exports get no more."""
    moves, page_of = state.moves, state.host.page_of
    for number, count in plan.kept.exports:
        if (export := moves.exports.get(number)) is not None:
            keys = export.keys[export.num_ready : count]
            moves.outbox.append(PagesReady(number, tuple(page_of[key] for key in keys)))
            export.num_ready = count
    for number, export in moves.exports.items():
        if not export.is_over and export.num_ready == export.num_leased and _ends(state, export):
            export.is_over = True
            moves.outbox.append(ExportOver(number))


def _ends(state: EngineState, export: KvExport) -> bool:
    """Return whether an export to another engine gets no pages after those already leased: either all of its pages are
    leased, or this engine neither has the next one nor is to wait for it."""
    if export.num_leased == len(export.keys):
        return True
    return not (export.waits or state.is_at_hand(export.keys[export.num_leased]))


def _missing(state: EngineState, keys: list[PrefixKey]) -> list[PrefixKey]:
    """Return the rest of the prefix `keys` that begins with the first key whose KV page this engine neither has nor
    awaits from another engine; empty if there is no such key."""
    for number, key in enumerate(keys):
        if not (state.is_at_hand(key) or state.moves.is_awaited(key, state.steps.now)):
            return keys[number:]
    return []


def _receive(state: EngineState, number: int, fetch: KvImport, count: int) -> None:
    """Enter the next `count` KV pages of a fetch from another engine, which have come, into the host tier. A page is
    freed instead if the tier has got a copy of the same key otherwise meanwhile."""
    for key in list(fetch.pages)[:count]:
        page = fetch.pages.pop(key)
        if key in state.host.page_of:
            state.host.unreserve([page])
        else:
            state.host.put(key, page)
        if state.moves.awaited.get(key) == number:
            del state.moves.awaited[key]
    fetch.num_come += count
    state.counters.kv.pages_in += count


def _stop_awaiting(state: EngineState, number: int, fetch: KvImport) -> None:
    for key in fetch.pages:
        if state.moves.awaited.get(key) == number:
            del state.moves.awaited[key]
