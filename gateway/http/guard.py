"""Protects the HTTP server against slow and oversized peers: limits how much and how slowly a peer may send, and how
slowly it may read. Refusals have the same form as all other errors of the API."""

from __future__ import annotations

import asyncio
import http
import math
from typing import Any

import httptools
import structlog
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.core.errors import ApiError, Fault, invalid_request
from gateway.core.trace_context import request_id_from
from gateway.http.stream import encode_json

log = structlog.get_logger("http")

KEEP_ALIVE_SECONDS = 15
"""Seconds that a connection may be idle. This is longer than the 5 s for which httpx, and so OpenAI's client, keeps a
connection. When both values were 5 s, some requests were sent on a connection that was just being closed."""

VERSIONS = ("1.1", "1.0")


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, one instance for each connection, with deadlines and size limits. Times are in seconds.

    A peer that exceeds them is disconnected. Before, it gets an error response if it was sending a request and no
    response to that has begun.
    """

    max_head_bytes = 64 * 2**10
    max_headers = 128
    head_seconds = 20.0
    """Maximum time from the start of a connection or a request to the end of the request's headers."""
    body_seconds = 30.0
    """Maximum time for a body to arrive, extended by the received bytes divided by `min_rate`."""
    min_rate = 16 * 2**10
    """Minimum rate, in bytes per second, at which a peer must send a body or read a response."""
    max_unread_bytes = 8 * 2**20
    """Maximum bytes of a body that may arrive after the response was sent. Up to it, clients that send the whole body
    before they read still get the response."""
    write_seconds = 60.0
    """Maximum time for a peer to read the data buffered for it, extended by the buffered bytes divided by `min_rate`.
    A slower peer is disconnected, which ends and settles a request that is still being answered."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_bytes = self._number = 0
        self._body_bytes = self._unread_bytes = 0
        self._in_head = self._in_body = False
        self._late_timer: asyncio.TimerHandle | None = None
        self._stalled_timer: asyncio.TimerHandle | None = None
        self._refusal: ApiError | None = None
        self._expect(self.head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._late_timer, self._stalled_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, and refuse the request if they lie within a head that is larger than `max_head_bytes`.
        Bytes with the beginning or the end of a head are left to `on_headers_complete`, as they may hold a body."""
        within, number = self._in_head, self._number
        super().data_received(data)
        if within and self._in_head and number == self._number:
            self._head_bytes += len(data)
            if self._head_bytes > self.max_head_bytes:
                self._refuse(_head_too_large(self.max_head_bytes))

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal or invalid_request("this is not a valid HTTP request"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        self._number += 1
        self._expect(self.head_seconds)

    def on_headers_complete(self) -> None:
        self._in_head, self._in_body = False, True
        self._body_bytes = self._unread_bytes = 0
        if self.parser.get_http_version() not in VERSIONS:
            raise httptools.HttpParserError("an old or an unknown version")
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > self.max_head_bytes or len(self.headers) > self.max_headers:
            self._refusal = _head_too_large(self.max_head_bytes)
            raise httptools.HttpParserError("headers too large")
        self._expect(self.body_seconds)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self.cycle.response_complete:
            self._unread_bytes += len(body)
            if self._unread_bytes > self.max_unread_bytes:
                self.transport.abort()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        self._due = math.inf
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not (self._in_head or self._in_body):
            self._expect(self.head_seconds + self._reading_seconds)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled_timer = self.loop.call_later(self._reading_seconds, self._cut_off)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled_timer is not None:
            self._stalled_timer.cancel()

    def _expect(self, seconds: float) -> None:
        """Set the deadline for the next step of the peer's request, such as its headers, to `seconds` from now.

        Each connection has one timer. Resetting it takes 2 us, so it is not reset at each step of a request. It may
        therefore fire early; if nothing is due then, it is started again.
        """
        self._due = self.loop.time() + seconds
        if self._late_timer is None or self._late_timer.when() > self._due:
            self._look_in(seconds)

    def _look_in(self, seconds: float) -> None:
        if self._late_timer is not None:
            self._late_timer.cancel()
        self._late_timer = self.loop.call_later(seconds, self._look)

    def _look(self) -> None:
        due = self._due + (self._body_bytes / self.min_rate if self._in_body else 0.0)
        left = due - self.loop.time()
        if left > 0:
            self._look_in(min(left, self.head_seconds))
        elif self.flow.read_paused or (not self._in_body and self._is_answering):
            self._look_in(1.0)
        elif self._in_head or self._in_body:
            self._refuse(invalid_request("the request did not arrive in time"))
        else:
            self.transport.abort()

    @property
    def _reading_seconds(self) -> float:
        """Seconds that the peer may take to read what is in the transport's write buffer; 0 if that is empty. Data in
        the kernel's buffer is not included."""
        unread = self.transport.get_write_buffer_size()
        return self.write_seconds + unread / self.min_rate if unread else 0.0

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _cut_off(self) -> None:
        log.info("client_stalled", unread_bytes=self.transport.get_write_buffer_size())
        self.transport.abort()

    def _refuse(self, error: ApiError) -> None:
        """Log the error, send it as a response if no response has begun, and close the connection, because the start of
        the next request is unknown. A handler that still works on the request sees a disconnect."""
        begun = self.cycle is not None and (self.cycle.response_started if self._is_answering else self._in_body)
        request_id = request_id_from("")
        log.info("refused_on_the_wire", request_id=request_id, status=error.http_status, reason=error.message)
        if begun:
            self.transport.abort()
            return
        if self._is_answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.write(_answer(error, request_id))
        self.transport.close()


def guarded_config(app: ASGIApp, protocol: type[GuardedProtocol] = GuardedProtocol, **options: Any) -> uvicorn.Config:
    """Return the uvicorn configuration that serves an application with `protocol`, whose idle connections are closed
    after KEEP_ALIVE_SECONDS. `options` are further arguments of `uvicorn.Config`. WebSockets and uvicorn's logs are
    off, and proxy headers are ignored, because the caller's identity follows from its key alone."""
    fixed: dict[str, Any] = {"ws": "none", "proxy_headers": False, "log_config": None, "access_log": False}
    return uvicorn.Config(app, http=protocol, timeout_keep_alive=KEEP_ALIVE_SECONDS, **fixed, **options)


def _head_too_large(most: int) -> ApiError:
    return ApiError(
        Fault.REQUEST_TOO_LARGE, f"the request's headers are more, or larger, than the {most} bytes allowed"
    )


def _answer(error: ApiError, request_id: str) -> bytes:
    body = encode_json(error.body())
    headers: dict[str, Any] = {
        "content-type": "application/json",
        "content-length": len(body),
        "connection": "close",
        "x-request-id": request_id,
        **error.headers(),
    }
    lines = [f"HTTP/1.1 {error.http_status} {http.HTTPStatus(error.http_status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body
