"""What the HTTP server's connections know of their peers: whether one has left, how slowly it reads, and how to answer
one that speaks HTTP/1.0."""

from __future__ import annotations

import asyncio
import math
import socket
import sys

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

TCP_CLOSE, TCP_CLOSE_WAIT = 7, 8
"""States of a TCP connection in Linux (include/net/tcp_states.h): it is reset, or the peer has closed its side."""


def has_left(transport: asyncio.Transport) -> bool:
    """Return whether the peer has closed or reset the connection, also if bytes that it sent before are not read yet.
    Always False on systems other than Linux."""
    if sys.platform != "linux":
        return False
    try:
        info = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    except OSError:  # a socket of another family, or a closed one
        return False
    return info[0] in (TCP_CLOSE, TCP_CLOSE_WAIT)


class WritingTime:
    """Seconds that a peer may still let one response wait for it, which are fewer the longer it has already done so.
    Only the time in which the write buffer is full counts; a generation may take long between two tokens."""

    def __init__(self, seconds: float, rate: float) -> None:
        """The peer may take `seconds`, and longer if it reads at least `rate` bytes per second."""
        self._left = seconds
        self._rate = rate
        self._since = 0.0
        self._unread = 0

    def pause(self, now: float, unread: int) -> float:
        """Return the seconds in which the peer must read most of `unread` bytes, which fill the write buffer."""
        self._since, self._unread = now, unread
        return max(0.0, self._left + unread / self._rate)

    def resume(self, now: float, unread: int) -> None:
        """Note that only `unread` bytes are left in the write buffer."""
        self._left += (self._unread - unread) / self._rate - (now - self._since)


class UnframedResponses:
    """ASGI application that runs `app` for a client of HTTP/1.0. Such a client knows no chunks: a response of unknown
    length ends with the connection, which uvicorn closes for it."""

    def __init__(self, app: ASGIApp, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._cycle = cycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_unframed(message: Message) -> None:
            self._unframe(message)
            await send(message)

        await self._app(scope, receive, send_unframed)

    def _unframe(self, message: Message) -> None:
        """Make uvicorn take a response without a content-length for one whose length is right."""
        cycle = self._cycle
        if message["type"] == "http.response.start":
            if not any(name.lower() == b"content-length" for name, _ in message.get("headers", ())):
                cycle.chunked_encoding, cycle.expected_content_length = False, math.inf  # type: ignore[assignment]
        elif cycle.expected_content_length == math.inf and not message.get("more_body", False):
            cycle.expected_content_length = len(message.get("body", b""))
