"""Streams of background responses: their events are read from Redis, whichever gateway process runs the response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from gateway.core.errors import ApiError, Fault
from gateway.core.tenant_room import TenantRoom
from gateway.openai.render import PING
from gateway.responses.render import last_event, typed_event
from gateway.responses.store import MAX_EVENTS, EventPage, ResponseStore

POLL_SECONDS, MAX_POLL_SECONDS = 0.05, 0.5
"""Seconds between two reads of events from Redis: after a read that returned events, and the maximum up to which the
time doubles while none come."""


class EventFeed:
    """Reads the events of one background response for one client. The last event is not stored: it is made from the
    response object, however the response ended."""

    ping = PING

    def __init__(
        self,
        store: ResponseStore,
        watches: TenantRoom,
        tenant: str,
        response_id: str,
        start: int = 0,
        known: Sequence[bytes] = (),
    ) -> None:
        """`watches` counts the stream while it is read. `start` is the number of the first event that the client wants.
        `known` are the events from that number on that need not be read from Redis."""
        self._store, self._watches, self._response = store, watches, (tenant, response_id)
        self._start, self._known = start, known

    async def pages(self) -> AsyncGenerator[bytes, None]:
        """Yield the events as they come, several together, until the response has ended; the first item, perhaps empty,
        comes at once. Raises ApiError: RESPONSE_NOT_FOUND, INVALID_REQUEST, and at first REGISTRY_UNAVAILABLE,
        RATE_LIMIT_EXCEEDED."""
        with self._watches.taken(self._response[0]):
            page = EventPage(self._known, self._start) if self._known else await self._next()
            pause = POLL_SECONDS
            while page.ended is None:
                yield self._taken(page)
                pause = POLL_SECONDS if page.events else min(2 * pause, MAX_POLL_SECONDS)
                if len(page.events) < MAX_EVENTS:
                    await asyncio.sleep(pause)
                page = await self._next_if_there()
            yield self._taken(page) + (last_event(page.ended, page.number) if self._start <= page.number else b"")

    def failure(self, error: ApiError) -> bytes:
        """Return OpenAI's event for an error that ends the stream but not the response."""
        fields = {"code": error.code, "message": error.message, "param": error.param}
        return typed_event("error", self._start, fields)

    def _taken(self, page: EventPage) -> bytes:
        self._start += len(page.events)
        return b"".join(page.events)

    async def _next(self) -> EventPage:
        return await self._store.events(*self._response, self._start)

    async def _next_if_there(self) -> EventPage:
        """Return the next events, or an empty page while Redis is away."""
        try:
            return await self._next()
        except ApiError as error:
            if error.fault is not Fault.REGISTRY_UNAVAILABLE:
                raise
            return EventPage((), self._start)
