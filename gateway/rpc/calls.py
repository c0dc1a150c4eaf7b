"""One RPC that is being answered: its caller, request id, metadata, messages and refusal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple, NoReturn
from urllib.parse import unquote

import grpc
from google.protobuf.message import Message

from gateway.core.administrators import Administrator
from gateway.core.errors import ApiError, invalid_request
from gateway.core.tenants import Principal
from gateway.core.trace_context import Ingress, request_id_from, session_from, trace_context_from
from gateway.requests.path import ArrivingRequest
from gateway.requests.service import Gateway
from gateway.requests.wire_room import WireHold
from gateway.rpc.errors import field_path, status_of

NO_HEADERS: Mapping[str, str] = MappingProxyType({})

DEADLINE_MARGIN = 0.01
"""Seconds before the caller's deadline at which the gateway gives up. The error status then still reaches the caller,
and the call is not mistaken for one whose caller disconnected."""

MIN_WATCH_SECONDS = 0.1
MAX_WATCH_SECONDS = 60.0
DEFAULT_WATCH_SECONDS = 1.0


class Refusal(NamedTuple):
    """How a call is refused. It has no reference to the exception, whose traceback keeps the call's messages alive."""

    status: grpc.Status
    headers: Mapping[str, str] | None
    """Headers to send as initial metadata, beside the request id. None means that no initial metadata are sent."""


class RpcCall:
    """One RPC that is being answered: wraps gRPC's context. `Entrance` creates one for each call and gives it to the
    handler. Of the caller's metadata, only `authorization`, `x-request-id`, `x-session-id`, `traceparent` and, for
    keys with networks, `x-forwarded-for` are read."""

    write_seconds = 60.0
    """Seconds that a caller may leave a message unread once the transport's buffer is full. Then the call is ended."""

    def __init__(self, context: grpc.aio.ServicerContext, method: str) -> None:
        """`method` is the method's name, as /package.Service/Method."""
        self.context = context
        self.hold: WireHold | None = None
        """The bytes that the call's message and its answer hold. None means that both are small."""
        self.message_bytes = 0
        """Size of the latest message. To ask the message itself for it would encode it again: 10 ms for the longest."""
        self._method = method
        self._opened = False
        self._principal: Principal | None = None
        self._again: Callable[[RpcCall], None] | None = None
        self._metadata = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
        asked = self._metadata.get("x-request-id", "")
        self.request_id = request_id_from(asked)
        self.field_of: Callable[[str], str] = field_path
        """Function that maps the name of an HTTP API field to its name in the request message, for errors."""

    @property
    def token(self) -> str | None:
        """API key in the metadata `authorization: Bearer KEY`. None means that the caller sent none."""
        scheme, _, token = self._metadata.get("authorization", "").partition(" ")
        return token.strip() if scheme.lower() == "bearer" else None

    @property
    def origin(self) -> tuple[str, str]:
        """The address of the connection's peer, empty if it has none, and all of the metadata `x-forwarded-for`."""
        kind, _, place = str(self.context.peer()).partition(":")
        peer = unquote(place).rpartition(":")[0] if kind in ("ipv4", "ipv6") else ""
        pairs = self.context.invocation_metadata()
        return peer, ",".join(str(value) for key, value in pairs if key == "x-forwarded-for")

    @property
    def principal(self) -> Principal:
        """The caller, which has authenticated."""
        assert self._principal is not None, "the entrance identifies the callers of all methods that have handlers"
        return self._principal

    @property
    def administrator(self) -> Administrator:
        """The caller of a method for administrators."""
        assert self.principal.administrator is not None, "the entrance lets only administrators call"
        return self.principal.administrator

    @property
    def tenant(self) -> str:
        """Name of the caller's tenant."""
        return self.principal.tenant.name

    def identify(self, principal: Principal, again: Callable[[RpcCall], None]) -> None:
        """Set the caller; `again` authenticates it again."""
        self._principal, self._again = principal, again

    def check(self) -> None:
        """Raise ApiError if the caller must not call this method any longer, such as with a key that was deleted since.
        Streams without an end check before each message."""
        assert self._again is not None, "the entrance identifies the callers of all methods that have handlers"
        self._again(self)

    def free(self) -> None:
        """Count the call's message as let go."""
        if self.hold is not None:
            self.hold.free()

    @cached_property
    def ingress(self) -> Ingress:
        """The origin of the call: its method, with the trace context and the session that the caller sent."""
        trace = trace_context_from(self._metadata.get("traceparent", ""))
        return Ingress(self._method, trace, session_from(self._metadata.get("x-session-id", "")))

    def arriving(self, gateway: Gateway) -> ArrivingRequest:
        """Return a context manager in which a refusal of the request is reported (see `Gateway.arriving`)."""
        arrival = gateway.arriving(self.request_id, self.ingress)
        if self._principal is not None:
            arrival.identify(self._principal)
        return arrival

    @property
    def time_remaining(self) -> float | None:
        """Seconds until DEADLINE_MARGIN before the caller's deadline; 0 or less if that has passed. None means that the
        caller set no deadline."""
        remaining: float | None = self.context.time_remaining()
        return None if remaining is None else remaining - DEADLINE_MARGIN

    async def read(self) -> bytes | None:
        """Wait for the next message and return its bytes. None means that there is none: the caller has sent all, has
        left, or has sent a message larger than gRPC accepts, which then ends the call itself."""
        message = await self.context.read()
        return None if message is grpc.aio.EOF else message

    async def open(self, headers: Mapping[str, str] = NO_HEADERS) -> None:
        """Send the request id and `headers` as initial metadata, unless `open` was called before. Raises CancelledError
        if the caller has disconnected."""
        if not self._opened:
            self._opened = True
            with _caller_present():
                await self.context.send_initial_metadata((("x-request-id", self.request_id), *headers.items()))

    async def send(self, message: Message) -> None:
        """Send one message of a stream. Return when the transport's buffer has space for more. Raises CancelledError if
        the caller has disconnected, or has not read for `write_seconds`."""
        with _caller_present():
            async with asyncio.timeout(self.write_seconds):
                await self.context.write(message)

    def set_trailing(self, metadata: Mapping[str, str]) -> None:
        self.context.set_trailing_metadata(tuple(metadata.items()))

    def refusal(self, error: ApiError) -> Refusal:
        """Return how to refuse the call for an error."""
        # The request id and x-ratelimit and x-lora headers are initial metadata, except for UNAVAILABLE: with them a
        # call counts as begun, and a client's retry policy never retries it.
        status = status_of(error, self.request_id, self.field_of)
        if error.grpc_status == "UNAVAILABLE":
            return Refusal(status, None)
        sent = {key: value for key, value in error.extra_headers.items() if key.startswith(("x-ratelimit-", "x-lora"))}
        return Refusal(status, sent)

    async def refuse(self, refusal: Refusal) -> NoReturn:
        """End the call with a status. Raises the exception with which gRPC expects a handler to end."""
        if refusal.headers is not None:
            await self.open(refusal.headers)
        await self.context.abort_with_status(refusal.status)
        raise AssertionError("abort_with_status raises")


def watch_interval(seconds: float) -> float:
    """Return the polling interval of a Watch call in seconds, which is DEFAULT_WATCH_SECONDS if 0 is given. Raises
    ApiError: INVALID_REQUEST, the interval is not from MIN_WATCH_SECONDS to MAX_WATCH_SECONDS."""
    seconds = seconds or DEFAULT_WATCH_SECONDS
    if not MIN_WATCH_SECONDS <= seconds <= MAX_WATCH_SECONDS:
        bounds = f"from {MIN_WATCH_SECONDS:g} to {MAX_WATCH_SECONDS:g}"
        raise invalid_request(f"interval_seconds must be {bounds}", "interval_seconds")
    return seconds


@contextmanager
def _caller_present() -> Iterator[None]:
    """Raise CancelledError in place of gRPC's InternalError or a TimeoutError of the block's write: the caller has
    disconnected, or has stopped reading, which gRPC does not report."""
    try:
        yield
    except (grpc.aio.InternalError, TimeoutError) as error:
        raise asyncio.CancelledError("the caller has left") from error
