"""Operations on responses for tenants: parsing with the conversation before, storing, reading and deleting."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Literal

import msgspec
import structlog
from msgspec.structs import replace

from gateway.core.errors import MAX_QUOTED, ApiError, invalid_request, unsupported_parameter
from gateway.core.space import Disk, SpaceUse
from gateway.core.tenant_room import TenantRoom
from gateway.core.tenants import Principal, Tenant
from gateway.core.trace_context import UNKNOWN, Ingress, new_id
from gateway.requests.deadlines import earliest
from gateway.requests.service import Gateway
from gateway.requests.types import Admitted, GenerateRequest
from gateway.responses.background import BackgroundRun, BackgroundRuns
from gateway.responses.calls import ResponseCall, response_call
from gateway.responses.events import EventFeed
from gateway.responses.parse import parse
from gateway.responses.record import Json, ResponseEntry, checked_id, item_number, new_entry
from gateway.responses.references import references, resolved
from gateway.responses.render import Keep
from gateway.responses.schema import ResponsesRequest
from gateway.responses.store import MAX_STORED_BYTES, Conversation, ResponseStore

Storing = Literal["never", "on_request", "by_default"]
"""Which responses are stored: none, those whose requests say `store: true`, or all but those that say false."""
BACKGROUND_SECONDS = 86_400.0
"""Seconds that a background response may take: no client waits for it at a connection, so the server's time limit for
whole answers does not apply."""
MOST_HELD_BYTES = 64 * 2**20
"""Maximum bytes of the stored conversations, as they are stored, that one tenant's running requests continue: eight of
the longest. A request of 200 bytes brings one into memory before any limit of the tenant applies and, in the
background, holds no connection."""
TOO_MANY_HELD = "your running requests continue conversations of {held} bytes; try again later"
ITEM_BYTES = 64
"""Bytes as which an item of the input counts when it is made ready to be stored."""
DEFAULT_PAGE, MAX_PAGE = 20, 100

log = structlog.get_logger("responses")


@dataclass(frozen=True, slots=True)
class ItemPage:
    """A page of the items of a response's input, for JSON; `has_more` is True if more items follow."""

    data: Sequence[Json]
    has_more: bool


class Responses:
    """Operations on responses, one object per gateway process. Callers see only the responses of their own tenant."""

    def __init__(self, store: ResponseStore, storing: Storing = "on_request", disk: Disk | None = None) -> None:
        """`storing` says which responses are stored. `disk` is the store's. None means that the store is not on this
        machine."""
        self.store = store
        self._disk = disk
        self.background = BackgroundRuns()
        self._storing = storing
        self._held = TenantRoom(MOST_HELD_BYTES, TOO_MANY_HELD)

    async def call(
        self, gateway: Gateway, tenant: Tenant, text: bytes, request_id: str, ingress: Ingress = UNKNOWN
    ) -> ResponseCall:
        """Parse `text`, the JSON body of /v1/responses, by the tenant's settings, and read what it refers to. A
        response that would be stored only by default is not stored if there is no room for it or Redis is away.

        Raises:
            ApiError: as `response_call` and `ResponseStore.history` raise, and INVALID_JSON; UNSUPPORTED_PARAMETER;
                RATE_LIMIT_EXCEEDED, running conversations take too much memory; INSUFFICIENT_STORAGE.
        """
        body = await gateway.parsing.run(tenant.name, len(text), partial(parse, text, tenant.unknown_fields))
        stores, before = await self._before(tenant.name, body, len(text))
        body, referenced = await self._with_items(tenant.name, body)
        keep: Keep | None = partial(self._keep, gateway, tenant.name, body) if stores and not body.background else None
        understood = partial(response_call, body, request_id, ingress, before.items, keep)
        num_bytes = before.num_bytes + referenced
        self._held.take(tenant.name, num_bytes)  # at once: the conversation is in memory while it waits its turn
        try:
            call = await gateway.parsing.run(tenant.name, len(text) + num_bytes, understood)
        except BaseException:
            self._held.free(tenant.name, num_bytes)
            raise
        # The conversation is held until the chat is garbage-collected.
        weakref.finalize(call.chat, self._held.free, tenant.name, num_bytes).atexit = False
        return call

    async def _before(self, tenant: str, body: ResponsesRequest, num_bytes: int) -> tuple[bool, Conversation]:
        """Return whether the response to a request of so many bytes is stored, and the conversation that it
        continues. Raises what `call` does."""
        stores, previous = self._stores(body), body.previous_response_id
        if not stores and previous is None:
            return False, Conversation()
        try:
            if stores:
                self._check_disk(SpaceUse.UPLOAD)
            return stores, await self.store.history(tenant, previous, num_bytes if stores else None)
        except ApiError:
            if body.store or body.background or previous is not None:
                raise
            return False, Conversation()

    async def _with_items(self, tenant: str, body: ResponsesRequest) -> tuple[ResponsesRequest, int]:
        """Return a body whose references to items of stored responses are replaced by the items, and the bytes of
        these. Raises ApiError: INVALID_REQUEST, an item is not there; REGISTRY_UNAVAILABLE."""
        if isinstance(body.input, str) or not (places := references(body.input)):
            return body, 0
        lists = await self.store.items(tenant, list(dict.fromkeys(place.list for place in places.values())))
        items, num_bytes = resolved(body.input, places, lists)
        return replace(body, input=items), num_bytes

    async def begin(
        self, gateway: Gateway, principal: Principal, call: ResponseCall, request: GenerateRequest
    ) -> tuple[Json, EventFeed]:
        """Store a background response as queued, run it in a task, and return its object and, with `stream`, its
        events. Raises ApiError: MODEL_NOT_FOUND, INSUFFICIENT_QUOTA, REGISTRY_UNAVAILABLE, RATE_LIMIT_EXCEEDED for open
        streams."""
        speech = gateway.models.speech(principal.tenant, request.model)
        sampled = gateway.models.sampled(principal.tenant, request)
        unique, tenant = new_id(), principal.tenant
        lane, model = tenant.effective_lane(request.lane), request.model.model[:MAX_QUOTED]
        heat = sampled.given("temperature"), sampled.given("top_p")
        admitted = Admitted(unique, request.request_id, int(time.time()), model, lane, "", (), {}, speech, *heat)
        renderer = call.envelope(admitted)
        queued = renderer.queued()
        entry = await _entry(gateway, tenant.name, call.body, queued)
        # The block makes sure that there is room for the stream before the response is stored. The caller reads the
        # events at once: nothing else runs on the event loop until `EventFeed.pages` counts the stream again.
        with gateway.watches.taken(tenant.name) if call.stream else nullcontext():
            await self.store.create(tenant.name, entry, streams=call.stream)
        run = BackgroundRun(self.store, tenant.name, entry.id, renderer, call.reader, streams=call.stream)
        limited = replace(request, deadline=earliest(request.deadline, BACKGROUND_SECONDS), ignore_server_timeout=True)
        self.background.start(entry.id, run, gateway, principal, limited)
        return queued, EventFeed(self.store, gateway.watches, tenant.name, entry.id, known=run.opening)

    def events(self, gateway: Gateway, tenant: str, response_id: str, after: int = -1) -> EventFeed:
        """Return the events of a background response that follow the event with the number `after`; -1 means all of
        them. Raises ApiError: RESPONSE_NOT_FOUND."""
        return EventFeed(self.store, gateway.watches, tenant, checked_id(response_id), after + 1)

    async def cancel(self, tenant: str, response_id: str) -> Json:
        """Cancel a background response, unless it has ended, and return it. Tokens that it has used are charged. Raises
        ApiError: RESPONSE_NOT_FOUND, REGISTRY_UNAVAILABLE; INVALID_REQUEST, it does not run in the background."""
        response = await self.store.cancel(tenant, checked_id(response_id))
        if response["status"] == "cancelled":
            self.background.stop(response_id)
        return response

    async def get(self, tenant: str, response_id: str) -> Json:
        """Return a stored response object, for JSON. Raises ApiError: RESPONSE_NOT_FOUND, REGISTRY_UNAVAILABLE."""
        return await self.store.get(tenant, checked_id(response_id))

    async def input_items(
        self,
        tenant: str,
        response_id: str,
        *,
        after: str | None = None,
        limit: int = DEFAULT_PAGE,
        newest_first: bool = True,
    ) -> ItemPage:
        """Return at most `limit` items of the input of a stored response that follow the item `after` (None: from the
        beginning), without those of earlier responses. `newest_first` reverses their order. Raises ApiError:
        RESPONSE_NOT_FOUND, REGISTRY_UNAVAILABLE; INVALID_REQUEST, there is no such `after`."""
        items = await self.store.input(tenant, checked_id(response_id))
        number = None if after is None else item_number(response_id, after)
        if after is not None and (number is None or number >= len(items)):
            raise invalid_request("after must be the id of an item of this response's input", "after")
        if newest_first:
            rest = items[::-1] if number is None else items[:number][::-1]
        else:
            rest = items if number is None else items[number + 1 :]
        return ItemPage([msgspec.json.decode(item) for item in rest[:limit]], len(rest) > limit)

    async def delete(self, tenant: str, response_id: str) -> Json:
        """Delete a stored response, and return OpenAI's object that confirms it. A response that still runs is
        cancelled. Conversations cannot be continued from it, or from those that continue it, any more. Raises ApiError:
        RESPONSE_NOT_FOUND, REGISTRY_UNAVAILABLE."""
        await self.store.delete(tenant, checked_id(response_id))
        self.background.stop(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    def _stores(self, body: ResponsesRequest) -> bool:
        """Return whether the response to a request is to be stored. Raises ApiError: UNSUPPORTED_PARAMETER, the request
        demands it and the operator does not allow it, or its fields contradict each other."""
        for name in ("store", "background") if self._storing == "never" else ():
            if getattr(body, name):
                raise unsupported_parameter(name, "must be false or absent: the operator stores no responses")
        if body.background and body.store is False:
            raise unsupported_parameter("store", "must not be false where background is true")
        by_default = self._storing == "by_default" or bool(body.background)
        return by_default if body.store is None else body.store

    def _check_disk(self, use: SpaceUse) -> None:
        if self._disk is not None:
            self._disk.check(use)

    async def _keep(self, gateway: Gateway, tenant: str, body: ResponsesRequest, response: Json) -> bool:
        """Store a complete response; returns whether it was stored. A failure is logged."""
        response_id = response["id"]
        try:
            self._check_disk(SpaceUse.RESULT)
            entry = await _entry(gateway, tenant, body, response)
            if entry.num_bytes > MAX_STORED_BYTES:
                log.warning("response_not_stored", tenant=tenant, response=response_id, bytes=entry.num_bytes)
                return False
            await self.store.keep(tenant, entry)
        except ApiError as error:
            log.warning("response_not_stored", tenant=tenant, response=response_id, reason=error.reason)
            return False
        return True


async def _entry(gateway: Gateway, tenant: str, body: ResponsesRequest, response: Json) -> ResponseEntry:
    """Return the entry of a response to be stored, which is made in a thread if its input has many items."""
    make = partial(new_entry, response, body.input, body.previous_response_id or "")
    num_bytes = len(body.input) if isinstance(body.input, str) else len(body.input) * ITEM_BYTES
    return await gateway.parsing.run(tenant, num_bytes, make)
