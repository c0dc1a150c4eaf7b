"""Requests of a simulated cluster whose prompt one replica computes, and whose answer another continues once all full
pages have arrived. A chunk's KV is sent when its step ends."""

from __future__ import annotations

import heapq
from collections.abc import Container
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import NamedTuple

from engine.core.memory.prefix import realm_of
from engine.core.messages.requests import Lane, PageId, PrefixKey, Request
from engine.core.messages.step import StepPlan
from engine.core.state.engine_state import EngineState
from engine.core.state.page_keys import page_keys
from engine.core.state.sequence import Sequence
from lab.devices.links import Transfers


@dataclass(slots=True, eq=False)
class Handover:
    """State of a request on its way from the replica that computes its prompt (`source`) to the one that continues its
    answer (`target`) in a simulated cluster."""

    request: Request
    source: int
    target: int
    arrived: float = 0.0
    """When the KV sent so far has arrived, in virtual seconds."""
    pieces: int = 0
    """Number of pieces of KV that have not been sent yet."""
    is_finished: bool = False
    """True means that the source has made the first token."""
    has_source: bool = True
    """False means that the source died, so that the target computes the prompt again."""


class _Piece(NamedTuple):
    """A piece of a prompt's KV that the source can send from the virtual second `ready` on."""

    ready: float
    number: int
    """Serial number, by which pieces that are ready at the same time are ordered."""
    size: float
    handover: Handover


class _Arrival(NamedTuple):
    at: float
    number: int
    """Serial number, by which arrivals at the same time are ordered."""
    handover: Handover


class Handovers:
    """The handovers under way in a simulated cluster: requests whose prompt one replica computes, and whose answer
    another one continues with its KV. `kv_bytes_per_token` is the size of the KV of a token."""

    def __init__(self, transfers: Transfers, kv_bytes_per_token: float) -> None:
        self._transfers = transfers
        self._kv_bytes = kv_bytes_per_token
        self._first_parts: dict[str, Handover] = {}
        """Request id -> handover whose source has not produced the first token yet."""
        self._arrivals: list[_Arrival] = []
        self._pieces: list[_Piece] = []
        self._numbers = count()
        self.count = 0
        """Requests that were handed over so far."""

    def begin(self, request: Request, source: int, target: int) -> Request:
        """Register the handover of a request from `source` to `target`. Return the request to submit to the source,
        which ends after one token."""
        self._first_parts[request.id] = Handover(request, source, target)
        return request._replace(params=request.params._replace(max_tokens=1, min_tokens=0))

    def note_step(self, plan: StepPlan, end: float) -> None:
        """Schedule the sending of the KV of a step's requests that will be handed over: what it found in the prefix
        cache when it starts, and what it computed at its `end` in virtual seconds."""
        for admission in plan.admitted:
            self._send(admission.request_id, admission.num_computed, plan.now)
        for chunk in plan.chunks:
            self._send(chunk.request_id, chunk.num_tokens, end)

    def pages_saved(self, plan: StepPlan, block_size: int) -> int:
        """Return the number of KV pages that a step fills for requests that will be handed over. A source that keeps KV
        in host memory copies these pages there."""
        count = 0
        for request_id, start, num_tokens, *_ in plan.chunks:
            if request_id in self._first_parts:
                count += (start + num_tokens) // block_size - start // block_size
        return count

    def finish_first(self, request_id: str, token: int, now: float) -> bool:
        """Record that a replica has finished a request, or only its first token, at `now`. Return True if the request
        will be handed over to another replica, False if it stays where it is."""
        if (handover := self._first_parts.pop(request_id, None)) is None:
            return False
        request = handover.request
        handover.request = request._replace(produced=(token,), moves=request.moves + 1)
        handover.arrived, handover.is_finished = max(now, handover.arrived), True
        self.count += 1
        self._arrive(handover)
        return True

    def forget(self, request_id: str) -> None:
        """Forget a request's handover, if there is one: the request has ended on its source, or the source died before
        the first token."""
        self._first_parts.pop(request_id, None)

    def lose(self, replica: int) -> None:
        """Record that a replica died. The target of a handover computes the prompt anew if its KV has not all arrived
        from this replica."""
        under_way = [one.handover for one in self._arrivals] + [one.handover for one in self._pieces]
        for handover in under_way:
            if handover.source == replica:
                handover.has_source = False

    @property
    def next_at(self) -> float:
        """Virtual second at which the next piece of KV is ready to be sent or the next handover's KV has arrived;
        infinity if no handover is under way."""
        waiting = [self._arrivals[0].at] if self._arrivals else []
        waiting += [self._pieces[0].ready] if self._pieces else []
        return min(waiting, default=float("inf"))

    def pop(self, now: float) -> Handover | None:
        """Send the KV that is ready at `now` (virtual seconds), and return a handover whose KV has arrived by then.
        None means that there is none."""
        self._send_ready(now)
        return heapq.heappop(self._arrivals).handover if self._arrivals and self._arrivals[0].at <= now else None

    def _arrive(self, handover: Handover) -> None:
        if handover.is_finished and not handover.pieces:
            heapq.heappush(self._arrivals, _Arrival(handover.arrived, next(self._numbers), handover))

    def _send_ready(self, now: float) -> None:
        """Send the pieces of KV that are ready at `now`, the earliest first. No piece that is ready before `now` may be
        added later."""
        while self._pieces and self._pieces[0].ready <= now:
            piece = heapq.heappop(self._pieces)
            handover = piece.handover
            handover.pieces -= 1
            arrived = self._transfers.send(handover.source, handover.target, piece.size, piece.ready)
            handover.arrived = max(handover.arrived, arrived)
            self._arrive(handover)

    def _send(self, request_id: str, tokens: int, ready: float) -> None:
        if tokens and (handover := self._first_parts.get(request_id)) is not None:
            handover.pieces += 1
            heapq.heappush(self._pieces, _Piece(ready, next(self._numbers), tokens * self._kv_bytes, handover))


def place_pages(state: EngineState, request: Request, now: float) -> None:
    """Put the KV of a request's full prompt pages into a simulated engine, as if sent by another: into host memory, if
    it keeps KV there, else into free or idle device pages, as far as there is room."""
    realm = realm_of(request, share_prefixes=state.config.share_prefixes)
    seq = Sequence(request, [*request.prompt_ids, *request.produced], realm=realm)
    keys = page_keys(seq, len(request.prompt_ids) // state.config.block_size, state.config.block_size)
    own, host, prefix = set(keys), state.host, state.prefix
    missing = [key for key in keys if key not in prefix.page_of and key not in host.page_of]
    if host.num_pages:
        reusable = (host.page_of[key] for key in host.reusable(needed=False) if key not in own)
        for key, page in zip(missing, list(islice(chain(host.free, reusable), len(missing))), strict=False):
            host.put(key, page)
        return
    for key, page in zip(missing, _device_pages(state, len(missing), own), strict=False):
        prefix.register(key, page, request.lane)
        prefix.idle[request.lane][page] = now


def _device_pages(state: EngineState, count: int, kept: Container[PrefixKey]) -> list[PageId]:
    """Take up to `count` device pages that are free or idle in the prefix cache, the oldest first, and return them.
    Pages whose keys are in `kept` are not taken."""
    prefix, free = state.prefix, state.pool.free
    pages = [free.popitem()[0] for _ in range(min(count, len(free)))]
    idle = (page for lane in reversed(Lane) for page in prefix.idle[lane] if prefix.key_of[page] not in kept)
    for page in list(islice(idle, count - len(pages))):
        prefix.drop(page)
        pages.append(page)
    return pages
