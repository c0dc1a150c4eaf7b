"""Protects the HTTP server against slow and oversized peers: limits how much and how slowly a peer may send, and how
slowly it may read. Refusals have the same form as all other errors of the API."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from typing import Any

import httptools
import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.core.errors import ApiError, invalid_request
from gateway.core.trace_context import request_id_from
from gateway.http.caller import HEAD_BYTES
from gateway.http.drain_turns import DrainTurns
from gateway.http.peer import UnframedResponses, WritingTime, has_left
from gateway.http.wire_limits import WireLimits, head_too_large, refusal_bytes
from gateway.requests.wire_room import WireRoom

log = structlog.get_logger("http")

HEAD_END = b"\r\n\r\n"
NOWHERE: Any = deque(maxlen=0)
"""List of headers that stays empty."""


class GuardedProtocol(WireLimits, HttpToolsProtocol):
    """uvicorn's HTTP protocol, one instance for each connection, with the deadlines and sizes of `WireLimits`.

    A peer that exceeds them is disconnected. Before, it gets an error response if it was sending a request and no
    response to that has begun. One request of a connection is parsed and answered at a time: what a peer sends behind
    it stays as it came until the response is complete, and is not read from the socket beyond one read. A body behind
    an `Upgrade` header, which is ignored, and trailers, which are dropped, are never read as anything else.
    """

    def __init__(self, *args: Any, room: WireRoom, drains: DrainTurns, **options: Any) -> None:
        """`room` bounds the heads that arrive at all connections of the process, and `drains` paces those of the port
        whose bodies are not read; the rest is uvicorn's."""
        super().__init__(*args, **options)
        self._drains = drains
        self._head_hold, self._ahead_hold = room.hold(), room.hold()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._ahead = b""
        self._line_bytes = 0
        """Bytes of the present head or, within a body, since its last piece."""
        self._body_bytes = self._unread_bytes = self._body_pieces = 0
        self._body_length: int | None = 0
        self._num_headers = 0
        """Number of headers of the present head or, within a body, of its trailers."""
        self._in_head = self._in_body = self._upgrades = False
        self._late_timer: asyncio.TimerHandle | None = None
        self._writing: WritingTime | None = None
        self._stalled_timer: asyncio.TimerHandle | None = None
        self._refusal: ApiError | None = None
        self._expect(self.head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._late_timer, self._stalled_timer):
            if timer is not None:
                timer.cancel()
        self._ahead = b""
        self._head_hold.free()
        self._ahead_hold.free()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes up to the end of the next request. What follows it waits until it is answered."""
        while data and not self.transport.is_closing():
            if not (self._in_head or self._in_body) and self._is_answering:
                self._keep_ahead(data)
                return
            end = self._end_of_step(data)
            self._parse(data if end >= len(data) else data[:end])
            data = data[end:]

    def _keep_ahead(self, data: bytes) -> None:
        """Keep what the peer has sent behind a request that is being answered. What is more than is granted counts for
        all strangers, because its key is not known yet; where there is no room for it, the connection ends."""
        self._ahead += data
        self._stop_reading()
        try:
            self._ahead_hold.take(max(0, len(self._ahead) - self.granted_head_bytes) - self._ahead_hold.num_bytes)
        except ApiError:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal or invalid_request("this is not a valid HTTP request"))

    def on_message_begin(self) -> None:
        if self._is_answering:  # behind chunks, whose end is not known before they are parsed
            self.cycle.keep_alive = False
            raise _Ahead
        self._unset_keepalive_if_required()
        super().on_message_begin()
        self._in_head, self._line_bytes, self._num_headers = True, 0, 0
        self._expect(self.head_seconds)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        if self._num_headers > self.max_headers:
            self._refusal = head_too_large(self.max_head_bytes)
            raise httptools.HttpParserError("too many headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head_hold.free()
        if self.parser.get_http_version() not in self.versions:
            raise httptools.HttpParserError("an old or an unknown version")
        size, self._body_length, self._num_headers = len(self.url), 0, 0
        for name, value in self.headers:
            size += len(name) + len(value)
            if name == b"content-length":
                self._body_length = int(value)
            elif name == b"transfer-encoding":
                self._body_length = None
        if size > self.max_head_bytes:
            self._refusal = head_too_large(self.max_head_bytes)
            raise httptools.HttpParserError("headers too large")
        if self.parser.should_upgrade():
            self._upgrades = True  # the parser is about to raise HttpParserUpgrade
            return
        self._in_head, self._in_body = False, True
        self._body_bytes = self._unread_bytes = self._body_pieces = 0
        self._writing = None
        self._expect(self.body_seconds)
        self.scope["state"][HEAD_BYTES] = size
        super().on_headers_complete()
        self.headers = NOWHERE  # to which uvicorn would add trailers, also while the request is answered

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        self._body_pieces += 1
        if (self._body_pieces - self.free_chunks) * self.min_chunk_bytes > self._body_bytes:
            self._refusal = invalid_request(f"the chunks of a body must have {self.min_chunk_bytes} bytes or more each")
            raise httptools.HttpParserError("small chunks")
        if self.cycle.response_complete:
            self._drain(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._upgrades:
            return
        self._in_body = False
        self._due = math.inf
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._in_head or self._in_body:
            return
        self._expect(self.head_seconds + self._reading_seconds)
        if self._ahead:
            ahead, self._ahead = self._ahead, b""
            self._ahead_hold.free()
            self.data_received(ahead)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing = self._writing or WritingTime(self.write_seconds, self.min_rate)
        left = self._writing.pause(self.loop.time(), self.transport.get_write_buffer_size())
        self._stalled_timer = self.loop.call_later(left, self._cut_off)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._writing is not None:
            self._writing.resume(self.loop.time(), self.transport.get_write_buffer_size())
        if self._stalled_timer is not None:
            self._stalled_timer.cancel()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.scope["http_version"] == "1.0":
            app = UnframedResponses(app, cycle)
        super()._start_asgi_task(cycle, app)

    def _drain(self, num_bytes: int) -> None:
        """Count bytes of a body that is not read, and read on at once or in a turn; end the connection if there are
        too many."""
        self._unread_bytes += num_bytes
        if self._unread_bytes > self.max_unread_bytes:
            self.transport.abort()
        elif not self._drains.has_room(num_bytes) and self.transport.is_reading():
            self.transport.pause_reading()
            self._drains.wait(self._read_on)

    def _read_on(self) -> None:
        if not (self.flow.read_paused or self.transport.is_closing()):
            self.transport.resume_reading()

    def _end_of_step(self, data: bytes) -> int:
        """Return how many of the bytes to parse now: at most those up to the end of the head or of the body, or all if
        the end is not known."""
        if self._in_body:
            return len(data) if self._body_length is None else max(1, self._body_length - self._body_bytes)
        found = data.find(HEAD_END)
        return len(data) if found < 0 else found + len(HEAD_END)

    def _parse(self, data: bytes) -> None:
        """Parse bytes. Refuse the request if they lie within a head, trailers or the framing of a body that is larger
        than `max_head_bytes`, or within a head for which strangers' bytes leave no room."""
        was_in_body, before = self._in_body, self._body_bytes
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as stopped:
            self._parse_without_upgrade(data[stopped.args[0] :])
            return
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, _Ahead):
                self._stop_reading()
            else:
                self.send_400_response("")
            return
        if was_in_body != self._in_body or before != self._body_bytes:
            self._line_bytes = 0
        elif self._in_head or self._in_body:
            self._count_line(len(data))

    def _stop_reading(self) -> None:
        self.flow.pause_reading()
        self._look_in(self.peer_seconds)

    def _count_line(self, num_bytes: int) -> None:
        """Count bytes of a head, of trailers or of what frames a body."""
        granted = max(self._line_bytes, self.granted_head_bytes)
        self._line_bytes += num_bytes
        try:
            if self._line_bytes > self.max_head_bytes:
                raise head_too_large(self.max_head_bytes)
            if self._in_head and self._line_bytes > granted:
                self._head_hold.take(self._line_bytes - granted)
        except ApiError as error:
            self._refuse(error)

    def _parse_without_upgrade(self, rest: bytes) -> None:
        """Parse the head, after which the parser has stopped, again without its `Upgrade` header, and then `rest`.
        RFC 9110 lets a server ignore that header; the parser would take the body for another protocol's bytes."""
        self._upgrades = False
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":
            self.send_400_response("")
            return
        lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn sets it
        self.data_received(b"\r\n".join([*lines, b"", b""]) + rest)

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
        if self.flow.read_paused and has_left(self.transport):
            self.transport.abort()
        elif self.flow.read_paused:
            self._look_in(self.peer_seconds)
        elif left > 0:
            self._look_in(min(left, self.head_seconds))
        elif not self._in_body and self._is_answering:
            self._look_in(1.0)
        elif self._in_head or self._in_body:
            self._refuse(invalid_request("the request did not arrive in time"))
        elif self._is_idle:
            self._look_in(self.head_seconds)  # uvicorn closes it after `timeout_keep_alive`
        else:
            self.transport.abort()

    @property
    def _is_idle(self) -> bool:
        """Return whether the peer has read a complete response and may send a further request."""
        closing = self.transport.is_closing()
        return self.cycle is not None and not closing and not self.transport.get_write_buffer_size()

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
        self.transport.write(refusal_bytes(error, request_id))
        self.transport.close()


class _Ahead(Exception):
    """The bytes of a further request have come before the response to the one before it is complete."""
