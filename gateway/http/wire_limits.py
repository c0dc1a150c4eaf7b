"""What a peer may send, how slowly it may send and read, and what one is told that exceeds this."""

from __future__ import annotations

import http
from typing import Any

from gateway.core.errors import ApiError, Fault
from gateway.http.stream import encode_json


class WireLimits:
    """The limits of one connection. Times are in seconds."""

    versions = ("1.1", "1.0")
    max_head_bytes = 64 * 2**10
    """Maximum bytes of a request's headers, of its trailers, and of what frames its body between two pieces of it."""
    max_headers = 128
    """Maximum headers of a request, and of its trailers. A single read has up to 50,000 short ones: 6 ms of the event
    loop."""
    granted_head_bytes = 8 * 2**10
    """Bytes of a head that no bound on strangers counts, so that these cannot keep the requests of others out. Most
    requests have 0.3 to 4 KiB."""
    head_seconds = 20.0
    """Maximum time from the start of a connection or a request to the end of the request's headers."""
    body_seconds = 30.0
    """Maximum time for a body to arrive, extended by the received bytes divided by `min_rate`."""
    min_rate = 16 * 2**10
    """Minimum rate, in bytes per second, at which a peer must send a body or read a response."""
    free_chunks, min_chunk_bytes = 4096, 16
    """Number of chunks of a body that may be as small as they like, and minimum mean size in bytes of all of a longer
    one's. A single read of chunks of one byte held the event loop for 30 ms."""
    max_unread_bytes = 8 * 2**20
    """Maximum bytes of a body that may arrive after the response was sent. Up to it, clients that send the whole body
    before they read still get the response."""
    write_seconds = 60.0
    """Maximum time in which a peer lets a response wait for it, extended by the bytes that it reads divided by
    `min_rate`. A slower peer is disconnected, which ends and settles a request that is still being answered."""
    peer_seconds = 1.0
    """Interval at which the socket is asked whether the peer has left, while nothing is read from it."""


def head_too_large(most: int) -> ApiError:
    """Return the error for headers of more than `most` bytes, or of too many lines."""
    return ApiError(
        Fault.REQUEST_TOO_LARGE, f"the request's headers are more, or larger, than the {most} bytes allowed"
    )


def refusal_bytes(error: ApiError, request_id: str) -> bytes:
    """Return the whole HTTP response that refuses a request before any handler sees it."""
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
