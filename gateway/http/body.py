"""Reads the bodies of requests, decoded if they are compressed, within bounds of their size."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

from starlette.requests import Request

from gateway.core.errors import request_too_large
from gateway.http.caller import HEAD_BYTES, header, hold_of
from gateway.http.coding import check_coding, decoded
from gateway.requests.wire_room import REQUEST_BYTES

CHUNKED = b"transfer-encoding"
ENCODING = b"content-encoding"
LONG_BODY_BYTES = 64 * 2**10
"""Bytes of a body beyond which its tenant's limits of requests are asked before it is read, not only afterwards."""


class ClientGone(OSError):
    """The client disconnected before its request was complete."""


def has_long_body(request: Request) -> bool:
    """Return whether the body of a request does not come together with its headers, because it has more than
    LONG_BODY_BYTES or comes in chunks, or is compressed and may become as long."""
    declared = header(request.scope, b"content-length")
    if header(request.scope, ENCODING):
        return True
    return int(declared) > LONG_BODY_BYTES if declared.isdecimal() else bool(header(request.scope, CHUNKED))


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the whole body of a request, decoded if it is compressed, which stays counted in `hold_of`. A declared
    length is reserved there before the first byte is awaited, and other bytes count as they arrive.

    Raises ApiError: REQUEST_TOO_LARGE, as soon as it is known that the body exceeds `max_bytes`; RATE_LIMIT_EXCEEDED,
    OVERLOADED, there is no room for it; UNSUPPORTED_CODING, INVALID_REQUEST, it cannot be decoded. Raises ClientGone if
    the client disconnects before the body is complete.
    """
    hold, reserved = hold_of(request), _declared_bytes(request, max_bytes)
    hold.take(REQUEST_BYTES + request.scope["state"].get(HEAD_BYTES, 0) + reserved)
    pieces = []
    async for piece in _pieces(request, max_bytes):
        if len(piece) > reserved:
            hold.take(len(piece) - reserved)
        reserved = max(0, reserved - len(piece))
        pieces.append(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _declared_bytes(request: Request, max_bytes: int) -> int:
    """Return the length that a request declares for its body; 0 if it declares none, because the body comes in chunks.
    Raises ApiError (REQUEST_TOO_LARGE) if it exceeds `max_bytes`."""
    declared = header(request.scope, b"content-length")
    num_bytes = int(declared) if declared.isdecimal() else 0
    if num_bytes > max_bytes:
        raise request_too_large(max_bytes)
    return num_bytes


async def streamed_body(request: Request, max_bytes: int) -> AsyncGenerator[bytes, None]:
    """Yield the pieces of a request's body, decoded if it is compressed, as they arrive. Raises what `read_body` does,
    but counts nothing."""
    _declared_bytes(request, max_bytes)
    async for piece in _pieces(request, max_bytes):
        yield piece


async def _pieces(request: Request, max_bytes: int) -> AsyncGenerator[bytes, None]:
    """Yield the pieces of a request's body, decoded if it is compressed. Neither what arrives nor what is decoded may
    have more than `max_bytes`: raises ApiError (REQUEST_TOO_LARGE)."""
    coding = check_coding(header(request.scope, ENCODING))
    pieces = _bounded(_arriving(request), max_bytes)
    async for piece in _bounded(decoded(pieces, coding), max_bytes) if coding else pieces:
        yield piece


async def _bounded(pieces: AsyncIterator[bytes], max_bytes: int) -> AsyncGenerator[bytes, None]:
    received = 0
    async for piece in pieces:
        received += len(piece)
        if received > max_bytes:
            raise request_too_large(max_bytes)
        yield piece


async def _arriving(request: Request) -> AsyncGenerator[bytes, None]:
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone("the client hung up before its request was whole")
        more = message.get("more_body", False)
        yield message.get("body", b"")
