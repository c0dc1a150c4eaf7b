"""Stored responses of tenants in Redis. One script has all operations (stored.lua); each call runs one of them. Keys of
one tenant share the hash tag {tenant}; `*` is the configured prefix

    *response:{tenant}:ID       hash  the response; Redis deletes it when it expires
    *response:{tenant}:ID:events  list  the events of a background response that is streamed
    *response-ends:{tenant}     zset  ID or ID:events, scored by the time when it expires
    *response-charges:{tenant}  hash  ID or ID:events -> bytes that the tenant is charged for, and their sum as `total`

A response keeps its own input and output and the id of the one before it; whole conversations would take square memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec
from redis.asyncio import Redis

from gateway.core.errors import ApiError, Fault, invalid_request, response_not_found, unavailable
from gateway.openai.render import encode_json
from gateway.redis.client import Argument, RedisCalls, Script, StoreError
from gateway.responses.record import RESPONSE_ID, Json, ResponseEntry, State, response_object
from gateway.responses.schema import InputItem

CALL_SECONDS = 2.0
LEASE_SECONDS = 15.0
"""Seconds after its last renewal when a background response fails, because its gateway may have died."""
DAY = 86_400.0
MAX_STORED_BYTES = 16 * 2**20
"""Maximum size of one stored response. Only log probabilities make one so large."""
MOST_HISTORY_PARTS = 10_000
"""Maximum number of items of a conversation and of the parts of their content. The longest sessions of agents have some
thousands; as many take 40 ms to convert, in a thread."""
MOST_HISTORY_BYTES = 8 * 2**20
"""Maximum size, in bytes, of a conversation that a request continues: as much as a request body may have."""
MOST_LISTS = 1000
"""Maximum number of lists of items that the references of a request may read. It keeps Redis from other calls for 2 ms
at most, and its scripts can take no more than some thousand arguments."""
UNBOUNDED = 2**53
FULL = -1
"""Result of the script `finish` if the tenant has no room for the answer."""
NO_EVENTS, DROPPED = 0, -1
"""Results of the script `events`: the response's events are not stored at all; the first requested event is not stored
any more."""
MAX_EVENTS = 500
"""Maximum number of events that one call reads or appends."""
LOST = {
    "error": {"code": "server_error", "message": "the gateway that ran this response has ended; send the request again"}
}
"""Fields that replace those of a background response whose lease has run out, because its gateway died."""


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Seconds for which responses are kept, and the maximum bytes that one tenant may be charged for."""

    keep_seconds: float = 30 * DAY
    tenant_bytes: int = 256 * 2**20
    lease_seconds: float = LEASE_SECONDS
    events_seconds: float = 600.0
    """Seconds after the end of a background response for which its events are kept. They take some 250 bytes a token,
    60 times as many as the answer, and serve clients whose connection broke."""
    events_bytes: int = 16 * 2**20
    """Maximum bytes of the events of one response. The oldest are dropped first."""


class Conversation(NamedTuple):
    """Items of a conversation, oldest first, and their size as they are stored."""

    items: Sequence[InputItem] = ()
    num_bytes: int = 0


class ItemList(NamedTuple):
    """One of the two lists of items that a stored response has."""

    response_id: str
    field: Literal["input", "output"]


class EventPage(NamedTuple):
    """Consecutive events of a background response."""

    events: Sequence[bytes]
    number: int
    """Number that the next event of the response will have."""
    ended: Json | None = None
    """The response object if the response has ended and all its events are in this page or before it. None means that
    events follow."""


class ResponseStore:
    """Stored responses of all tenants. Every method raises ApiError (REGISTRY_UNAVAILABLE) while Redis is away. Tenants
    see only their own: others give the same RESPONSE_NOT_FOUND as responses that do not exist."""

    def __init__(self, client: Redis, limits: StoreLimits | None = None, *, prefix: str = "loralane:") -> None:
        self._calls = RedisCalls.without_breaker(client, prefix, CALL_SECONDS)
        self._script = Script.load("stored.lua", package="gateway.responses")
        self.limits = limits or StoreLimits()
        self._keep_ms = int(self.limits.keep_seconds * 1000)
        self._lease_ms = int(self.limits.lease_seconds * 1000)
        self._events_ms = int(self.limits.events_seconds * 1000)

    async def history(self, tenant: str, previous: str | None, num_bytes: int | None) -> Conversation:
        """Return the conversation that ends with the response `previous`, or an empty one. Unless `num_bytes` is None,
        check that the tenant has room for a response of at least that size.

        Raises:
            ApiError: INSUFFICIENT_QUOTA; PREVIOUS_RESPONSE_NOT_FOUND, also for an earlier one; INVALID_REQUEST, it is
                too long or lacks an answer.
        """
        if previous is not None and not RESPONSE_ID.fullmatch(previous):
            raise _broken("absent", previous, previous)
        bounds = (MOST_HISTORY_PARTS, MOST_HISTORY_BYTES)
        size = "" if num_bytes is None else num_bytes
        reply = await self._do("history", tenant, size, self.limits.tenant_bytes, previous or "", *bounds)
        room, texts, hindrance, response_id = reply
        if hindrance:
            raise _broken(hindrance.decode(), response_id.decode(), previous or "")
        if not room:
            raise self._full()
        in_order = [text for start in range(len(texts) - 2, -1, -2) for text in texts[start : start + 2]]
        items = [item for text in in_order for item in msgspec.json.decode(text, type=list[InputItem])]
        return Conversation(items, sum(map(len, texts)))

    async def items(self, tenant: str, lists: Sequence[ItemList]) -> dict[ItemList, list[msgspec.Raw]]:
        """Return the items of those of the lists that exist. Raises ApiError: INVALID_REQUEST, they are too many or too
        long."""
        if len(lists) > MOST_LISTS:
            raise invalid_request(f"input may refer to items of {MOST_LISTS} responses; send items themselves", "input")
        words = [word for each in lists for word in each]
        texts = await self._do("items", tenant, MOST_HISTORY_BYTES, *words) if lists else []
        if texts == 0:
            message = f"the responses that input refers to exceed {MOST_HISTORY_BYTES} bytes; send items themselves"
            raise invalid_request(message, "input")
        decode = msgspec.json.Decoder(list[msgspec.Raw]).decode
        return {each: decode(text) for each, text in zip(lists, texts, strict=True) if text is not None}

    async def keep(self, tenant: str, entry: ResponseEntry) -> None:
        """Store a complete response and charge the tenant for its size. Raises ApiError: INSUFFICIENT_QUOTA."""
        bounds = (self._keep_ms, entry.num_bytes, self.limits.tenant_bytes)
        if not await self._do("keep", tenant, entry.id, *bounds, *entry.fields()):
            raise self._full()

    async def create(self, tenant: str, entry: ResponseEntry, *, streams: bool = False) -> None:
        """Store a background response that has not begun, under a lease. `streams` says whether its events are kept.
        Raises ApiError: INSUFFICIENT_QUOTA."""
        bounds = (self._keep_ms, entry.num_bytes, self.limits.tenant_bytes, self._lease_ms)
        fields = (int(streams), self._events_ms, "background", 1, *entry.fields())
        if not await self._do("create", tenant, entry.id, *bounds, *fields):
            raise self._full()

    async def renew(
        self, tenant: str, response_id: str, state: State, start: int = 0, events: Sequence[bytes] = ()
    ) -> bool:
        """Renew the lease of a background response, set its `state`, and append at most MAX_EVENTS events from number
        `start`, each once and as room allows. Return False, without change, if it has ended or was deleted."""
        bounds = (self._lease_ms, state, self._events_ms, self.limits.events_bytes, self.limits.tenant_bytes)
        return bool(await self._do("renew", tenant, response_id, *bounds, start, *events))

    async def finish(
        self, tenant: str, response_id: str, state: State, ending: bytes, output: bytes, num_parts: int
    ) -> bool:
        """End a background response with the fields of `ending` and the items of `output`, both JSON, which have
        `num_parts` items and parts in all. False means that it has ended already or was deleted. Raises ApiError:
        INSUFFICIENT_QUOTA."""
        room = (len(ending) + len(output), UNBOUNDED if state == "failed" else self.limits.tenant_bytes)
        fields = ("ending", ending, "output", output, "answer_parts", num_parts)
        outcome = await self._do("finish", tenant, response_id, *room, state, *fields)
        if outcome == FULL:
            raise self._full()
        return bool(outcome)

    async def get(self, tenant: str, response_id: str) -> Json:
        """Return a response object, for JSON. A background response whose lease ran out has failed. Raises ApiError:
        RESPONSE_NOT_FOUND."""
        return self._object(response_id, await self._do("read", tenant, response_id, encode_json(LOST)))

    async def events(self, tenant: str, response_id: str, start: int) -> EventPage:
        """Return the events of a background response from the number `start` on, at most MAX_EVENTS of them. Raises
        ApiError: RESPONSE_NOT_FOUND; INVALID_REQUEST, it has no events, or they are not kept any more."""
        reply = await self._do("events", tenant, response_id, encode_json(LOST), start, MAX_EVENTS)
        if reply is None:
            raise response_not_found(response_id)
        if reply == NO_EVENTS:
            message = "only a response created with background: true and stream: true can be streamed, for"
            raise invalid_request(f"{message} {self.limits.events_seconds:g} s after its end", "stream")
        if reply == DROPPED:
            message = f"event {start} is not kept any more; retrieve the response without stream"
            raise invalid_request(message, "starting_after")
        number, events, ended = reply
        return EventPage(events, number, self._object(response_id, ended) if ended else None)

    async def input(self, tenant: str, response_id: str) -> list[msgspec.Raw]:
        """Return the items of the input of a response as JSON. Raises ApiError: RESPONSE_NOT_FOUND."""
        reply = await self._do("input", tenant, response_id)
        if reply is None:
            raise response_not_found(response_id)
        return msgspec.json.decode(reply, type=list[msgspec.Raw])

    async def cancel(self, tenant: str, response_id: str) -> Json:
        """Cancel a background response, unless it has ended, and return it. Raises ApiError: RESPONSE_NOT_FOUND;
        INVALID_REQUEST if it does not run in the background."""
        reply = await self._do("cancel", tenant, response_id, encode_json(LOST), b"{}")
        if reply == 0:
            raise invalid_request("only a response with background: true can be cancelled", "response_id")
        return self._object(response_id, reply)

    async def delete(self, tenant: str, response_id: str) -> None:
        """Delete a response and refund its charge. Raises ApiError: RESPONSE_NOT_FOUND."""
        if not await self._do("remove", tenant, response_id):
            raise response_not_found(response_id)

    async def use(self, tenant: str) -> int:
        """Return the number of bytes that a tenant is charged for."""
        return int(await self._do("use", tenant))

    def _object(self, response_id: str, reply: Sequence[bytes] | None) -> Json:
        if reply is None:
            raise response_not_found(response_id)
        state, head, ending, output = reply
        return response_object(state.decode(), head, ending, output)

    def _full(self) -> ApiError:
        message = f"the tenant's stored responses may have {self.limits.tenant_bytes} bytes together; delete some"
        return ApiError(Fault.INSUFFICIENT_QUOTA, message)

    async def _do(self, operation: str, tenant: str, *args: Argument) -> Any:
        kinds = ("response", "response-ends", "response-charges")
        keys = [self._calls.key(kind, tenant) for kind in kinds]
        try:
            return await self._calls.run(self._script, keys, [operation, *args])
        except StoreError as error:
            raise unavailable(Fault.REGISTRY_UNAVAILABLE, "stored responses are not available") from error


def _broken(hindrance: str, response_id: str, previous: str) -> ApiError:
    """Return the error for a conversation that cannot be continued from `previous`. `hindrance` is `absent` (a response
    of the conversation does not exist), `long`, or the state of a response without an answer."""
    param = "previous_response_id"
    if hindrance == "absent":
        where = "" if response_id == previous else f", which comes before {previous},"
        message = (
            f"the stored response {response_id!r}{where} is not there: it does not exist, was created without "
            "store: true, was deleted, or has expired"
        )
        return ApiError(Fault.PREVIOUS_RESPONSE_NOT_FOUND, message, param)
    if hindrance == "long":
        size = f"{MOST_HISTORY_PARTS} items and parts and {MOST_HISTORY_BYTES} bytes"
        return invalid_request(f"the conversation exceeds {size}; begin another one", param)
    return invalid_request(f"the response {response_id} has no answer to continue: it is {hindrance}", param)
