"""The outermost layer of the HTTP API: request ids, turns of strangers, and uniform error responses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.anthropic.errors import error_body, error_status, is_messages_path
from gateway.api_schema.console import CONSOLE
from gateway.core.errors import (
    ApiError,
    Fault,
    internal,
    invalid_request,
    method_not_allowed,
    route_not_found,
)
from gateway.core.lifecycle import Lifecycle
from gateway.core.part import COMMON, is_admin_path
from gateway.core.trace_context import request_id_from
from gateway.http.body import ClientGone
from gateway.http.caller import HOLD, header
from gateway.http.hints import method_hint, route_hint
from gateway.http.stream import json_response
from gateway.requests.turns import LoopTurns
from gateway.requests.wire_room import WireHold, WireRoom

log = structlog.get_logger("http")

PIECE_BYTES = 64 * 2**10
"""Bytes of a response that are written at a time. uvicorn waits between two writes until the peer has read most of what
is written, so that only this much of a response is copied into the connection's buffers."""

CLOSE = ((b"connection", b"close"),)
"""Header of the responses of a gateway that drains. uvicorn closes the connection after it, and the client's next one
goes to another gateway."""
PROBES = frozenset(("/health", "/ready", "/ping"))
"""Paths whose requests never wait for a turn: to a supervisor, a late answer means that the gateway is ill."""
DOCUMENTS = COMMON - PROBES
"""Paths that are answered without a look at the key, which any header would be taken for."""
STRANGERS = ""
"""Name under which all clients without a key, or with a wrong one, take their turns together."""


class RequestMiddleware:
    """ASGI application around the router: assigns request ids, adds them to responses, and turns errors into responses.

    Unexpected exceptions are logged and become a 500; a client that has disconnected gets none. Errors after a response
    has begun leave it incomplete. It replaces `Starlette`'s middleware, in which every write passes through each layer.
    """

    def __init__(self, router: Router, room: WireRoom, lifecycle: Lifecycle | None = None) -> None:
        """`room` bounds the bytes of requests that arrive, and counts those of responses that are not written yet.
        `lifecycle` says whether the gateway drains; None means that it never does."""
        self.router = router
        self._room = room
        self._lifecycle = lifecycle or Lifecycle()
        self._turns = LoopTurns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.router(scope, receive, send)
            return
        scope = _without_trailing_slash(scope)
        if scope["path"] in COMMON:
            await self._serve(scope, receive, send)
            return
        with self._lifecycle.working():
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        life = self._lifecycle
        scope["app"] = self  # makes the router raise an HTTPException instead of sending its own error response
        request_id = request_id_from(header(scope, b"x-request-id"))
        own_headers = [(b"x-request-id", request_id.encode())]
        if is_messages_path(scope["path"]):
            own_headers.append((b"request-id", request_id.encode()))  # the name that Anthropic's clients read
        state = scope.setdefault("state", {})
        state["request_id"], state[HOLD] = request_id, self._room.hold()
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", ()), *own_headers, *(CLOSE if life.is_draining else ())]
            elif len(message.get("body", b"")) > PIECE_BYTES:
                await _send_in_pieces(message, send, state[HOLD])
                return
            await send(message)

        try:
            if scope["path"] in DOCUMENTS or (scope["path"] not in PROBES and _names_no_key(scope)):
                await self._turns.take(STRANGERS)
            try:
                if life.refuses and scope["path"] not in COMMON and not is_admin_path(scope["path"]):
                    life.check()
                await self.router(scope, receive, send_with_id)
            except (ApiError, HTTPException) as error:
                if started:
                    raise
                if isinstance(error, ApiError) and error.fault in (Fault.INVALID_API_KEY, Fault.KEY_EXPIRED):
                    await self._turns.take(STRANGERS)
                await _error_response(scope, _api_error(scope, error))(scope, receive, send_with_id)
        except Exception as error:
            if isinstance(error, ClientGone) or (started and isinstance(error, OSError)):
                log.info("client_gone", request_id=request_id, reason=str(error))
                return
            log.exception("internal_error", request_id=request_id, path=scope["path"])
            if not started:
                await _error_response(scope, internal(request_id))(scope, receive, send_with_id)
        finally:
            state[HOLD].free()


async def _send_in_pieces(message: Message, send: Send, hold: WireHold) -> None:
    """Send the body of a message in pieces, and count all of it in `hold` until the last one is written."""
    body, more = message["body"], message.get("more_body", False)
    hold.count(len(body))
    try:
        for start in range(0, len(body), PIECE_BYTES):
            end = start + PIECE_BYTES
            await send({"type": message["type"], "body": body[start:end], "more_body": more or end < len(body)})
    finally:
        hold.count(-len(body))


def _without_trailing_slash(scope: Scope) -> Scope:
    """Return the scope with one trailing slash removed from its path, so that `/v1/models/` is served as `/v1/models`.

    The paths `/` and `/console/` and paths that end in several or in escaped slashes stay as they are. A redirect
    would not do, because many clients drop the body of a POST when they follow one.
    """
    path, raw = scope["path"], scope.get("raw_path") or b""
    one = path.endswith("/") and raw.endswith(b"/") and not path.endswith("//")  # an escaped slash belongs to a name
    if not one or path in ("/", f"{CONSOLE}/"):  # the console's page names its files relative to its own path
        return scope
    return {**scope, "path": path[:-1], "raw_path": raw[:-1]}


class AsgiEndpoint:
    """ASGI endpoint of a route: calls the handler with the request, and then the ASGI application that the handler
    returns. It bypasses Starlette's wrapping of endpoints."""

    def __init__(self, handler: Callable[[Request], Awaitable[ASGIApp]]) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (await self._handler(Request(scope, receive, send)))(scope, receive, send)


def _names_no_key(scope: Scope) -> bool:
    return not any(value for name, value in scope["headers"] if name in (b"authorization", b"x-api-key"))


def _error_response(scope: Scope, error: ApiError) -> Response:
    """Return the JSON response for an error, in Anthropic's shape on the paths of its API and in OpenAI's elsewhere."""
    if not is_messages_path(scope["path"]):
        return json_response(error.body(), error.http_status, error.headers())
    body = error_body(error, scope["state"]["request_id"])
    return json_response(body, error_status(error.fault), error.headers())


def _api_error(scope: Scope, error: ApiError | HTTPException) -> ApiError:
    """Return the error to send. An HTTPException can only come from Starlette's router: a 404 gets a hint at what
    to use instead if there is one, a 405 also the allowed methods, and any other becomes INVALID_REQUEST."""
    if isinstance(error, ApiError):
        return error
    method, path, known = scope["method"], scope["path"], {route.path for route in _routes(scope)}
    if error.status_code == 404:
        return route_not_found(method, path, route_hint(path, known))
    if error.status_code == 405:
        return method_not_allowed(method, path, _allowed(scope), method_hint(path, known))
    return invalid_request(error.detail)


def _allowed(scope: Scope) -> str:
    """Return the methods of all routes with the request's path, sorted and separated by commas. The router itself
    reports only the methods of the first such route."""
    fitting = [route for route in _routes(scope) if route.matches(scope)[0] is not Match.NONE]
    return ", ".join(sorted({method for route in fitting for method in route.methods or ()}))


def _routes(scope: Scope) -> list[Route]:
    return [route for route in scope["router"].routes if isinstance(route, Route)]
