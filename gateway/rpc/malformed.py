"""An interceptor that refuses malformed protobuf requests with INVALID_ARGUMENT.

gRPC itself ends such a call with UNKNOWN and the name of a Python exception, which tells the caller nothing and looks
like a failure of the server. The interceptor makes deserializers return a marker instead of raising, and refuses
requests with that marker.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from gateway.core.errors import ApiError, invalid_request
from gateway.rpc.calls import RpcCall
from gateway.rpc.message_bounds import check_message

Handler = Any
"""Type of a method handler: a grpc.RpcMethodHandler, which is a named tuple."""
Behaviour = Callable[[Any, grpc.aio.ServicerContext], Any]


class Malformed:
    """Marker that replaces a request message whose bytes could not be parsed, or have too many values."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


MALFORMED = Malformed("the request is not a valid protobuf message of this method's request type")


class MalformedRequests(grpc.aio.ServerInterceptor):
    """Interceptor that makes every method refuse malformed requests. It wraps a method's handler at the first call."""

    def __init__(self) -> None:
        self._wrapped: dict[str, Handler] = {}

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]], details: grpc.HandlerCallDetails
    ) -> Handler:
        wrapped = self._wrapped.get(details.method)
        if wrapped is None:
            handler = await continuation(details)
            if handler is None:  # the method does not exist; gRPC reports that itself
                return None
            wrapped = self._wrapped[details.method] = _wrapped(handler)
        return wrapped


def _wrapped(handler: Handler) -> Handler:
    kind = f"{'stream' if handler.request_streaming else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"
    behaviour: Behaviour = getattr(handler, kind)
    guard = _guarded_stream if inspect.isasyncgenfunction(behaviour) else _guarded
    deserialise = _forgiving(handler.request_deserializer)
    return handler._replace(request_deserializer=deserialise, **{kind: guard(behaviour)})


def _forgiving(deserialise: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return a function that parses a message with `deserialise`, the method `FromString` of its type."""
    kind = deserialise.__self__.DESCRIPTOR  # type: ignore[attr-defined]

    def read(data: bytes) -> Any:
        try:
            check_message(data, kind)
            return deserialise(data)
        except DecodeError:
            return MALFORMED
        except ApiError as error:
            return Malformed(error.message)

    return read


def _guarded(behaviour: Behaviour) -> Behaviour:
    async def answer(request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await behaviour(_checked(request), context)
        except ApiError as error:
            await RpcCall(context).refuse(error)

    return answer


def _guarded_stream(behaviour: Behaviour) -> Behaviour:
    async def answer(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        try:
            async for message in behaviour(_checked(request), context):
                yield message
        except ApiError as error:
            await RpcCall(context).refuse(error)

    return answer


def _checked(request: Any) -> Any:
    """Return a request or, if it is a stream of messages, a stream of the same messages. Raises ApiError:
    INVALID_REQUEST, a message is malformed or too large; for a stream it is raised when that message is read."""
    if hasattr(request, "__aiter__"):
        return _checked_messages(request)
    if isinstance(request, Malformed):
        raise invalid_request(request.reason)
    return request


async def _checked_messages(messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for message in messages:
        yield _checked(message)
