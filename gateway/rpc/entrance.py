"""The entrance of all RPCs, an interceptor: authenticates the caller before its message is read, receives that within
bounds, runs the handler, and ends refused calls with their status."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from enum import Enum, auto
from functools import partial
from typing import Any

import grpc
import structlog
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from gateway.administration.trail import AdminTrail
from gateway.core.errors import ApiError, internal, invalid_request, permission_denied
from gateway.core.part import is_admin_service
from gateway.core.tenants import Authenticator, Principal
from gateway.requests.path import ArrivingRequest
from gateway.requests.service import Gateway
from gateway.requests.wire_room import STRANGERS, WireHold
from gateway.rpc.administration import administered, rows_of
from gateway.rpc.arrival import ArrivingMessages
from gateway.rpc.calls import RpcCall
from gateway.rpc.message_bounds import check_message

log = structlog.get_logger("grpc")

# gRPC itself reads and parses a unary call's message before any code of the gateway runs. So every method is served as
# one that reads a stream. A malformed message is INVALID_ARGUMENT in place of UNKNOWN.

PACKAGE = "loralane.v1"
"""The gRPC package whose services need an API key. The others, health and reflection, need none."""
STRANGER_MESSAGE_BYTES = 4 * 2**10
"""Maximum size of a message to a method that needs no key. It has the name of a service, file or message."""

ADMIN_MESSAGE_BYTES = 512 * 2**10
"""Maximum size of an administrator's message, as of a body over HTTP. It is parsed on the event loop."""

SMALL_BYTES = 4 * 2**10
"""Maximum size of messages and responses whose bytes are not counted. To count them would take 2 % of a small call's
time, and calls in progress take some KiB anyway."""

Handler = Any
"""Type of a method handler: a grpc.RpcMethodHandler, which is a named tuple."""


class Audience(Enum):
    """The callers that a method admits."""

    ANYONE = auto()
    TENANTS = auto()
    ADMINISTRATORS = auto()


MOST_BYTES: Mapping[Audience, int] = {
    Audience.ANYONE: STRANGER_MESSAGE_BYTES,
    Audience.ADMINISTRATORS: ADMIN_MESSAGE_BYTES,
}
"""Maximum sizes of messages by who may send them."""


class Method:
    """A method of a service, as its generated code describes it. `name` has the form /package.Service/Method."""

    def __init__(self, name: str, handler: Handler) -> None:
        self.name = name
        self.audience = _audience(name.split("/")[1])
        self.rows = rows_of(name) if self.audience is Audience.ADMINISTRATORS else None
        """What an administrator's method stands for, and the role that it needs. None for all other methods."""
        self.reads_stream: bool = handler.request_streaming
        request, response = ("stream" if flag else "unary" for flag in (self.reads_stream, handler.response_streaming))
        self.behaviour: Callable[[Any, Any], Any] = getattr(handler, f"{request}_{response}")
        self.yields = inspect.isasyncgenfunction(self.behaviour)
        self._deserialise: Callable[[bytes], Any] = handler.request_deserializer
        self._kind: Descriptor = handler.request_deserializer.__self__.DESCRIPTOR  # it is `FromString` of a type
        self.serialise: Callable[[Any], bytes] | None = None
        """Function that serialises the only response. None means that the method answers with a stream."""
        if not handler.response_streaming:
            self.serialise = handler.response_serializer

    def parse(self, message: bytes) -> Any:
        """Return a request message. Raises ApiError (INVALID_REQUEST): it is malformed, has too many values or, for a
        method that needs no key or an administrator's, is too large; an administrator's has unknown fields."""
        most = MOST_BYTES.get(self.audience)
        if most is not None and len(message) > most:
            raise invalid_request(f"a message to this method has at most {most} bytes")
        check_message(message, self._kind)
        try:
            request = self._deserialise(message)
        except DecodeError:
            request = None
        if request is None:  # raised outside of the handler, whose exception would keep the message alive
            raise invalid_request("the request is not a valid protobuf message of this method's request type")
        if self.audience is Audience.ADMINISTRATORS and _discards_unknown(request):
            raise invalid_request("the request has fields that this gateway does not know; use a client of its version")
        return request


def _discards_unknown(request: Message) -> bool:
    """Remove the unknown fields of a message and of those in it. Return whether there were any."""
    num_bytes = request.ByteSize()
    request.DiscardUnknownFields()
    return request.ByteSize() != num_bytes


class Messages:
    """The request messages of a stream, as an async iterator. `receive` returns the next one, or None at the end."""

    def __init__(self, receive: Callable[[], Awaitable[Any]]) -> None:
        self._receive = receive

    def __aiter__(self) -> Messages:
        return self

    async def __anext__(self) -> Any:
        message = await self._receive()
        if message is None:
            raise StopAsyncIteration
        return message


class Entrance(grpc.aio.ServerInterceptor):
    """Interceptor before every method. Handlers get the parsed request and the `RpcCall` of a tenant or, for services
    that end with Admin, an administrator; they may return encoded responses."""

    def __init__(self, gateway: Gateway, keys: Authenticator, requests: Collection[str], trail: AdminTrail) -> None:
        """`requests` are the names of the methods that the observers of requests hear of, even if they are refused.
        `trail` runs the calls of administrators."""
        self._trail = trail
        self._gateway = gateway
        self._keys = keys
        self._requests = frozenset(requests)
        self._arriving = ArrivingMessages()
        self._handlers: dict[str, Handler] = {}

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]], details: grpc.HandlerCallDetails
    ) -> Handler:
        handler = self._handlers.get(details.method)
        if handler is None:
            found = await continuation(details)
            if found is None:  # the method does not exist; gRPC reports that itself
                return None
            handler = self._handlers[details.method] = self._handler(Method(details.method, found), found)
        return handler

    def _handler(self, method: Method, found: Handler) -> Handler:
        answer = partial(self._answer, method)
        if method.serialise is not None:
            return grpc.stream_unary_rpc_method_handler(answer)
        return grpc.stream_stream_rpc_method_handler(answer, response_serializer=found.response_serializer)

    async def _answer(self, method: Method, _: object, context: grpc.aio.ServicerContext) -> bytes | None:
        """Answer one call: return the only response, or send a stream and return None. An ApiError ends it with its
        status; any other exception is logged as a bug, and the caller receives INTERNAL."""
        # The exception is let go before the status is sent, which takes as long as the caller likes, because its
        # traceback keeps the message in memory.
        call = RpcCall(context, method.name)
        try:
            return await self._served(method, call)
        except grpc.aio.AbortError as ended:
            _let_go(ended)
            raise
        except ApiError as error:
            refusal = call.refusal(error)
        except Exception:
            log.exception("internal_error", request_id=call.request_id)
            refusal = call.refusal(internal(call.request_id))
        try:
            await call.refuse(refusal)
        except grpc.aio.AbortError as ended:
            _let_go(ended)
            raise

    async def _served(self, method: Method, call: RpcCall) -> bytes | None:
        with self._observed(method, call) as arrival:
            self._authenticate(method, call, arrival)
        if method.reads_stream:
            request: Any = Messages(partial(self._next, method, call))
        else:
            request = await self._message(method, call)
        if method.audience is Audience.ANYONE:
            return await _served_by_library(method, request, call)
        if method.rows is not None:
            serving = administered(self._trail, method.rows, method.behaviour, request, call)
        else:
            serving = method.behaviour(request, call)
        del request  # a handler lets its message go when it has understood it
        response = await serving
        await call.open()
        if method.serialise is None:
            return None
        answer = response if isinstance(response, bytes) else method.serialise(response)
        if len(answer) > SMALL_BYTES:
            self._hold(call).count(len(answer))
        return answer

    def _observed(self, method: Method, call: RpcCall) -> ArrivingRequest | AbstractContextManager[None]:
        """Return a context manager in which a refusal is reported to the observers, if the method is for requests."""
        if method.name not in self._requests:
            return nullcontext()
        return call.arriving(self._gateway)

    def _authenticate(self, method: Method, call: RpcCall, arrival: ArrivingRequest | None) -> None:
        """Identify the caller by its metadata. Raises ApiError: INVALID_API_KEY, KEY_EXPIRED, ADDRESS_NOT_ALLOWED,
        FORBIDDEN, PERMISSION_DENIED."""
        if method.audience is Audience.ANYONE:
            return
        principal = self._principal(call)
        if arrival is not None:
            arrival.identify(principal)
        call.identify(_allowed(method, principal), partial(self._again, method))

    def _principal(self, call: RpcCall) -> Principal:
        principal = self._keys.authenticate(call.token)
        if principal.networks:
            self._keys.check_address(principal, *call.origin)
        return principal

    def _again(self, method: Method, call: RpcCall) -> None:
        """Raise ApiError unless the caller of a stream may still call the method, for the same tenant as before."""
        now, before = _allowed(method, self._principal(call)), call.principal
        if _realm(now) != _realm(before):
            raise permission_denied("this key is of another tenant now; call again")

    async def _message(self, method: Method, call: RpcCall) -> Any:
        """Receive the only request message, wait for the tenant's turn on the event loop and parse the message. Raises
        ApiError: INVALID_REQUEST, it is missing or malformed; and what `_received` raises."""
        try:
            message = await self._received(method, call)
        except ApiError:  # observed, unlike a caller that leaves before its message has arrived
            with self._observed(method, call):
                raise
        if message is None:  # also where gRPC has refused a message that is too large
            raise invalid_request("the call has no request message")
        with self._observed(method, call):
            if method.audience is Audience.TENANTS:
                await self._gateway.turns.take(call.tenant)
            return await self._parsed(method, call, message)

    async def _next(self, method: Method, call: RpcCall) -> Any:
        """Receive the next request message of a stream, in place of the one before. None means that there is none.
        Raises what `_message` raises."""
        call.free()
        message = await self._received(method, call)
        return None if message is None else await self._parsed(method, call, message)

    async def _parsed(self, method: Method, call: RpcCall, message: bytes) -> Any:
        """Parse a message, off the event loop if it is a tenant's and long. Raises ApiError (INVALID_REQUEST)."""
        if method.audience is not Audience.TENANTS:
            return method.parse(message)
        return await self._gateway.parsing.run(call.tenant, len(message), partial(method.parse, message))

    async def _received(self, method: Method, call: RpcCall) -> bytes | None:
        """Receive a message, and count its bytes for the tenant. None means that there is none. Raises what
        `ArrivingMessages.read` and `WireHold.take` raise."""
        if method.audience is Audience.ANYONE:
            return await self._arriving.read(STRANGERS, call.read)
        owner = f"{call.tenant}/streams" if method.reads_stream else call.tenant  # uploads delay no other calls
        message = await self._arriving.read(owner, call.read)
        call.message_bytes = 0 if message is None else len(message)
        if call.message_bytes > SMALL_BYTES:
            self._hold(call).take(call.message_bytes)
        return message

    def _hold(self, call: RpcCall) -> WireHold:
        """Return the call's hold, which is free when the current task, which answers the call, has ended: its response
        has been received then."""
        if call.hold is None:
            call.hold = self._gateway.wire.hold(call.principal.tenant)
            task, free = asyncio.current_task(), call.hold.free
            assert task is not None
            task.add_done_callback(lambda _: free())
        return call.hold


async def _served_by_library(method: Method, request: Any, call: RpcCall) -> bytes | None:
    """Run a handler of gRPC's own services, which gets gRPC's context."""
    if method.yields:
        async for response in method.behaviour(request, call.context):
            await call.send(response)
        return None
    response = await method.behaviour(request, call.context)
    return None if method.serialise is None else method.serialise(response)


def _allowed(method: Method, principal: Principal) -> Principal:
    """Return a caller. Raises ApiError (FORBIDDEN, PERMISSION_DENIED) if the method is not for it."""
    return principal.as_admin(method.rows.role) if method.rows else principal.as_tenant()


def _realm(principal: Principal) -> str:
    """Return the name of the tenant whose objects a caller reaches. It is empty for administrators of all."""
    return principal.tenant.name if principal.administrator is None else principal.administrator.tenant


def _audience(service: str) -> Audience:
    if not service.startswith(f"{PACKAGE}."):
        return Audience.ANYONE
    return Audience.ADMINISTRATORS if is_admin_service(service) else Audience.TENANTS


def _let_go(ended: grpc.aio.AbortError) -> None:
    """Clear the traceback of the exception with which a call ends, once gRPC has handled it: gRPC keeps it in the
    call's state, a cycle that would keep messages in memory."""
    asyncio.get_running_loop().call_soon(_clear, ended)


def _clear(ended: grpc.aio.AbortError) -> None:
    ended.__traceback__ = ended.__context__ = None
