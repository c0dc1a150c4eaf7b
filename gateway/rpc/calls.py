"""What every RPC has in common: its id, who calls, its metadata, and how it is refused."""

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
from gateway.core.request_id import request_id_from
from gateway.core.tenants import Authenticator, Principal
from gateway.core.trace_context import Ingress, trace_context_from
from gateway.rpc.errors import status_of

log = structlog.get_logger("grpc")

NO_HEADERS: Mapping[str, str] = MappingProxyType({})

DEADLINE_MARGIN = 0.01
"""Seconds by which we give up before gRPC cancels: an answer still gets through, and is no caller who left."""

MIN_WATCH_SECONDS = 0.1
MAX_WATCH_SECONDS = 60.0
DEFAULT_WATCH_SECONDS = 1.0

T = TypeVar("T")


class Call:
    """One RPC being answered.

    Only `authorization`, `x-request-id` and `traceparent` of a caller's metadata are read: who somebody is follows from
    the key alone.
    """

    write_seconds = 60.0
    """That a caller may leave a message unread, once the transport has no room for more: then its call ends."""

    def __init__(self, context: grpc.aio.ServicerContext) -> None:
        self._context = context
        self._opened = False
        self._metadata = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
        asked = self._metadata.get("x-request-id", "")
        self.request_id = request_id_from(asked)

    @property
    def token(self) -> str | None:
        """The key a caller shows; None: there is none."""
        scheme, _, token = self._metadata.get("authorization", "").partition(" ")
        return token.strip() if scheme.lower() == "bearer" else None

    def ingress(self, method: str) -> Ingress:
        """`method`: with its service, as /package.Service/Method."""
        return Ingress(method, trace_context_from(self._metadata.get("traceparent", "")))

    @property
    def time_remaining(self) -> float | None:
        """Seconds to answer within, 0 or less when it is too late; None: the caller will wait."""
        remaining: float | None = self._context.time_remaining()
        return None if remaining is None else remaining - DEADLINE_MARGIN

    async def open(self, headers: Mapping[str, str] = NO_HEADERS) -> None:
        """Sends the initial metadata, unless they are out already."""
        if not self._opened:
            self._opened = True
            with _caller_present():
                await self._context.send_initial_metadata((("x-request-id", self.request_id), *headers.items()))

    async def send(self, message: Message) -> None:
        """One message of a stream; returns when the transport has room for more."""
        with _caller_present():
            async with asyncio.timeout(self.write_seconds):
                await self._context.write(message)

    def set_trailing(self, metadata: Mapping[str, str]) -> None:
        self._context.set_trailing_metadata(tuple(metadata.items()))

    async def refuse(self, error: ApiError) -> NoReturn:
        """Ends the call with a status; raises what gRPC wants a handler to end with.

        UNAVAILABLE goes out without initial metadata: with it a call counts as begun, and a client's retry policy would
        never try again (measured: 1 attempt with, 5 without). Its request id is in RequestInfo all the same.
        """
        if error.grpc_status != "UNAVAILABLE":
            await self.open(
                {key: value for key, value in error.extra_headers.items() if key.startswith(("x-ratelimit-", "x-lora"))}
            )
        await self._context.abort_with_status(status_of(error, self.request_id))
        raise AssertionError("abort_with_status raises")


async def respond(context: grpc.aio.ServicerContext, work: Callable[[Call], Awaitable[T]]) -> T:
    """Does a caller's work and returns its result.

    An ApiError becomes its status. Anything else is a bug of ours: logged, and INTERNAL without a word about it.
    """
    call = Call(context)
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


async def answer(
    context: grpc.aio.ServicerContext, keys: Authenticator, work: Callable[[Call, Principal], Awaitable[T]]
) -> T:
    """As `respond`, for callers with a key."""

    async def authenticated(call: Call) -> T:
        return await work(call, keys.authenticate(call.token))

    return await respond(context, authenticated)


async def administer(context: grpc.aio.ServicerContext, keys: Authenticator, work: Callable[[Call], Awaitable[T]]) -> T:
    """As `answer`, for administrators alone."""

    async def admitted(call: Call, principal: Principal) -> T:
        principal.as_admin()
        return await work(call)

    return await answer(context, keys, admitted)


def watch_interval(seconds: float) -> float:
    """Between two looks; 0: nothing was said. Raises ApiError: INVALID_REQUEST."""
    seconds = seconds or DEFAULT_WATCH_SECONDS
    if not MIN_WATCH_SECONDS <= seconds <= MAX_WATCH_SECONDS:
        bounds = f"from {MIN_WATCH_SECONDS:g} to {MAX_WATCH_SECONDS:g}"
        raise invalid_request(f"interval_seconds must be {bounds}", "interval_seconds")
    return seconds


@contextmanager
def _caller_present() -> Iterator[None]:
    """A write that fails means that the caller has left, which gRPC will tell us by cancelling the task anyway.

    One that takes too long means that it reads no more, which nobody will tell us.
    """
    try:
        yield
    except (grpc.aio.InternalError, TimeoutError) as error:
        raise asyncio.CancelledError("the caller has left") from error
