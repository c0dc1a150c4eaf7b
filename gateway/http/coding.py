"""Decodes request bodies that come compressed (RFC 9110, section 8.4)."""

from __future__ import annotations

import zlib
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial

from gateway.core.errors import ApiError, invalid_request, unsupported_coding
from gateway.core.in_thread import in_thread

IDENTITY = frozenset(("", "identity"))
KNOWN = ("gzip", "x-gzip", "deflate")
"""Codings that are decoded. `x-gzip` is an old name of gzip; `deflate` is zlib's format (RFC 1950)."""
DETECTED = zlib.MAX_WBITS | 32
"""Window size with which zlib finds out itself whether a stream is gzip's or its own."""
STEP_BYTES = 64 * 2**10
"""Bytes that go into or come out of one step. It usually takes 0.2 ms, but 30 ms where the bytes are made of empty
blocks, so that a thread takes it."""


def check_coding(coding: str) -> str:
    """Return the name of a body's coding in lower case; empty if the body is not compressed. Raises ApiError
    (UNSUPPORTED_CODING): it is no coding, or not the only one, that is decoded."""
    name = coding.strip().lower()
    if name in IDENTITY:
        return ""
    if name not in KNOWN:
        raise unsupported_coding(name, ", ".join(KNOWN))
    return name


async def decoded(pieces: AsyncIterator[bytes], coding: str) -> AsyncGenerator[bytes, None]:
    """Yield the content of a compressed body, in pieces of at most STEP_BYTES. `pieces` are those of the body, and
    `coding` is what `check_coding` returns for it. Raises ApiError: INVALID_REQUEST, the body is broken, ends too early
    or goes on behind its end."""
    stream = zlib.decompressobj(DETECTED)
    begun = False
    async for piece in pieces:
        begun = begun or bool(piece)
        for start in range(0, len(piece), STEP_BYTES):
            rest = piece[start : start + STEP_BYTES]
            content = b""
            while rest or len(content) == STEP_BYTES:
                content = await in_thread(partial(_step, stream, rest, coding))
                yield content
                rest = stream.unconsumed_tail
    if begun and not stream.eof:
        raise invalid_request(f"the body ends before its content in {coding} does")


def _step(stream: zlib._Decompress, data: bytes, coding: str) -> bytes:
    """Decode the next bytes. What is left of `data` is in the stream's `unconsumed_tail`."""
    try:
        content = stream.decompress(data, STEP_BYTES)
    except zlib.error as error:
        raise _broken(coding) from error
    if stream.unused_data:
        raise _broken(coding)
    return content


def _broken(coding: str) -> ApiError:
    return invalid_request(f"the body is not one stream in {coding}, as the header content-encoding says")
