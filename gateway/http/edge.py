"""The outermost layer of HTTP: request ids, bounded bodies, and errors in one shape."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable

import structlog
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.core.errors import (
    ApiError,
    internal,
    invalid_request,
    method_not_allowed,
    request_too_large,
    route_not_found,
)
from gateway.core.request_id import request_id_from
from gateway.http.console import CONSOLE
from gateway.http.stream import json_response
from gateway.openai.absent import instead_of

log = structlog.get_logger("http")


class ClientGone(OSError):
    """Whoever was sending a request hung up before its end."""


class Edge:
    """All that is around the routes: every request gets an id, every response that id, every error its answer.

    It stands in for the layers that a `Starlette` has around its router, through each of which every write goes.
    """

    def __init__(self, router: Router) -> None:
        self.router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.router(scope, receive, send)
            return
        scope = _without_trailing_slash(scope)
        scope["app"] = self  # the router then raises what it refuses, in place of an answer of its own
        request_id = request_id_from(header(scope, b"x-request-id"))
        own_header = (b"x-request-id", request_id.encode())
        scope.setdefault("state", {})["request_id"] = request_id
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", ()), own_header]
            await send(message)

        try:
            try:
                await self.router(scope, receive, send_with_id)
            except (ApiError, HTTPException) as error:
                if started:
                    raise
                await _refusal(scope, error)(scope, receive, send_with_id)
        except Exception as error:
            if isinstance(error, ClientGone) or (started and isinstance(error, OSError)):
                log.info("client_gone", request_id=request_id, reason=str(error))
                return
            log.exception("internal_error", request_id=request_id, path=scope["path"])
            if not started:
                await error_response(internal(request_id))(scope, receive, send_with_id)


def _without_trailing_slash(scope: Scope) -> Scope:
    """Serve `/v1/models/` as `/v1/models`: a redirection would lose the body of a POST with many clients."""
    path, raw = scope["path"], scope.get("raw_path") or b""
    one = path.endswith("/") and raw.endswith(b"/") and not path.endswith("//")  # an escaped slash is part of a name
    if not one or path in ("/", f"{CONSOLE}/"):  # the console's page names its files relative to its own path
        return scope
    return {**scope, "path": path[:-1], "raw_path": raw[:-1]}


class Direct:
    """An endpoint that is an application of its own: no layer of Starlette's is between it and `Edge`."""

    def __init__(self, handler: Callable[[Request], Awaitable[ASGIApp]]) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (await self._handler(Request(scope, receive, send)))(scope, receive, send)


def header(scope: Scope, name: bytes) -> str:
    """The first of that name, which is in lower case; empty: there is none."""
    for known, value in scope["headers"]:
        if known == name:
            return str(value, "latin-1")
    return ""


def request_id(request: Request) -> str:
    return str(request.scope["state"]["request_id"])


def bearer_token(request: Request) -> str | None:
    """The key a caller shows; None: there is none."""
    scheme, _, token = header(request.scope, b"authorization").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Raises ApiError: REQUEST_TOO_LARGE, as soon as that is known; ClientGone."""
    return b"".join([piece async for piece in streamed_body(request, max_bytes)])


async def streamed_body(request: Request, max_bytes: int) -> AsyncGenerator[bytes, None]:
    """A body as it arrives. Raises as `read_body` does."""
    declared = header(request.scope, b"content-length")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise request_too_large(max_bytes)
    received, more = 0, True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone("the client hung up before its request was whole")
        piece, more = message.get("body", b""), message.get("more_body", False)
        received += len(piece)
        if received > max_bytes:
            raise request_too_large(max_bytes)
        yield piece


def error_response(error: ApiError) -> Response:
    return json_response(error.body(), error.http_status, error.headers())


def _refusal(scope: Scope, error: ApiError | HTTPException) -> Response:
    """An HTTPException is one of Starlette's own, and those are its router's."""
    if isinstance(error, ApiError):
        return error_response(error)
    method, path = scope["method"], scope["path"]
    if error.status_code == 404:
        return error_response(route_not_found(method, path, instead_of(path)))
    if error.status_code == 405:
        return error_response(method_not_allowed(method, path, _allowed(scope)))
    return error_response(invalid_request(error.detail))


def _allowed(scope: Scope) -> str:
    """Methods of all routes that have its path: the router knows those of the first."""
    routes = [route for route in scope["router"].routes if isinstance(route, Route)]
    fitting = [route for route in routes if route.matches(scope)[0] is not Match.NONE]
    return ", ".join(sorted({method for route in fitting for method in route.methods or ()}))
