"""Handling that all RPCs share: request ids, authentication, metadata, and refusals."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import NoReturn, TypeVar

import grpc
import structlog
from google.protobuf.message import Message

from gateway.core.errors import ApiError, internal, invalid_request
from gateway.core.tenants import Authenticator, Principal
from gateway.core.trace_context import Ingress, request_id_from, session_from, trace_context_from
from gateway.rpc.errors import field_path, status_of

log = structlog.get_logger("grpc")

NO_HEADERS: Mapping[str, str] = MappingProxyType({})

DEADLINE_MARGIN = 0.01
"""Seconds before the caller's deadline at which the gateway gives up. The error status then still reaches the caller,
and the call is not mistaken for one whose caller disconnected."""

MIN_WATCH_SECONDS = 0.1
MAX_WATCH_SECONDS = 60.0
DEFAULT_WATCH_SECONDS = 1.0

T = TypeVar("T")


class RpcCall:
    """One RPC that is being answered: wraps gRPC's context. `respond` creates one for each call. Of the caller's
    metadata, only `authorization`, `x-request-id`, `x-session-id` and `traceparent` are read."""

    write_seconds = 60.0
    """Seconds that a caller may leave a message unread once the transport's buffer is full. Then the call is ended."""

    def __init__(self, context: grpc.aio.ServicerContext) -> None:
        self._context = context
        self._opened = False
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

    def ingress(self, method: str) -> Ingress:
        """Return the origin of the call: its method, given as /package.Service/Method, with the trace context and the
        session that the caller sent."""
        trace = trace_context_from(self._metadata.get("traceparent", ""))
        return Ingress(method, trace, session_from(self._metadata.get("x-session-id", "")))

    @property
    def time_remaining(self) -> float | None:
        """Seconds until DEADLINE_MARGIN before the caller's deadline; 0 or less if that has passed. None means that the
        caller set no deadline."""
        remaining: float | None = self._context.time_remaining()
        return None if remaining is None else remaining - DEADLINE_MARGIN

    async def open(self, headers: Mapping[str, str] = NO_HEADERS) -> None:
        """Send the request id and `headers` as initial metadata, unless `open` was called before. Raises CancelledError
        if the caller has disconnected."""
        if not self._opened:
            self._opened = True
            with _caller_present():
                await self._context.send_initial_metadata((("x-request-id", self.request_id), *headers.items()))

    async def send(self, message: Message) -> None:
        """Send one message of a stream. Returns when the transport's buffer has space for more. Raises CancelledError
        if the caller has disconnected, or has not read for `write_seconds`."""
        with _caller_present():
            async with asyncio.timeout(self.write_seconds):
                await self._context.write(message)

    def set_trailing(self, metadata: Mapping[str, str]) -> None:
        self._context.set_trailing_metadata(tuple(metadata.items()))

    async def refuse(self, error: ApiError) -> NoReturn:
        """End the call with the status of an error. Raises the exception with which gRPC expects a handler to end.

        The request id and the error's x-ratelimit and x-lora headers are sent as initial metadata, except for
        UNAVAILABLE: with them a call counts as begun, and a client's retry policy would never retry it (measured: 1
        attempt with, 5 without). The request id is also in RequestInfo.
        """
        if error.grpc_status != "UNAVAILABLE":
            await self.open(
                {key: value for key, value in error.extra_headers.items() if key.startswith(("x-ratelimit-", "x-lora"))}
            )
        await self._context.abort_with_status(status_of(error, self.request_id, self.field_of))
        raise AssertionError("abort_with_status raises")


async def respond(context: grpc.aio.ServicerContext, work: Callable[[RpcCall], Awaitable[T]]) -> T:
    """Run `work` for an RPC, send the initial metadata unless `work` has sent it, and return its result.

    An ApiError ends the call with its gRPC status. Any other exception is a bug: it is logged, and the caller receives
    INTERNAL without details.
    """
    call = RpcCall(context)
    try:
        result = await work(call)
        await call.open()
    except ApiError as error:
        refusal = error
    except Exception:
        log.exception("internal_error", request_id=call.request_id)
        refusal = internal(call.request_id)
    else:
        return result
    return await call.refuse(refusal)


async def respond_authenticated(
    context: grpc.aio.ServicerContext, keys: Authenticator, work: Callable[[RpcCall, Principal], Awaitable[T]]
) -> T:
    """Authenticate the caller, run `work` with the call and the caller, and return its result. Errors, also
    INVALID_API_KEY, end the call as in `respond`."""

    async def authenticated(call: RpcCall) -> T:
        return await work(call, keys.authenticate(call.token))

    return await respond(context, authenticated)


async def respond_to_admin(
    context: grpc.aio.ServicerContext, keys: Authenticator, work: Callable[[RpcCall], Awaitable[T]]
) -> T:
    """Authenticate the caller, run `work` if it is an administrator, and return its result. Errors, also
    INVALID_API_KEY and FORBIDDEN, end the call as in `respond`."""

    async def admitted(call: RpcCall, principal: Principal) -> T:
        principal.as_admin()
        return await work(call)

    return await respond_authenticated(context, keys, admitted)


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
    """Raise CancelledError in place of an InternalError of gRPC or a TimeoutError that the block's write raises.

    A write that fails means that the caller has disconnected; gRPC will cancel the task for that anyway. A write that
    takes too long means that the caller has stopped reading, which gRPC does not report.
    """
    try:
        yield
    except (grpc.aio.InternalError, TimeoutError) as error:
        raise asyncio.CancelledError("the caller has left") from error
