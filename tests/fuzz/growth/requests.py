"""What a case sends: a request of HTTP as bytes, or a call of gRPC."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True)
class HttpRequest:
    method: str
    target: bytes
    """Path and query."""
    headers: Headers = ()
    body: bytes = b""
    chunk: int = 0
    """Bytes of each chunk of the body; 0 means that it is sent as a whole, with its length."""
    trailers: bytes = b""
    """What follows the last chunk."""

    def with_key(self, key: str) -> HttpRequest:
        return replace(self, headers=((b"authorization", b"Bearer " + key.encode()), *self.headers)) if key else self

    def to_bytes(self) -> bytes:
        length = (b"transfer-encoding", b"chunked") if self.chunk else (b"content-length", b"%d" % len(self.body))
        headers = ((b"host", b"gateway"), (b"connection", b"close"), length, *self.headers)
        lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
        head = self.method.encode() + b" " + self.target + b" HTTP/1.1\r\n" + lines + b"\r\n"
        return head + (self._chunks() if self.chunk else self.body)

    def _chunks(self) -> bytes:
        whole, rest = divmod(len(self.body), self.chunk)
        begin, view = b"%x\r\n" % self.chunk, memoryview(self.body)
        pieces = [begin + view[at : at + self.chunk] + b"\r\n" for at in range(0, whole * self.chunk, self.chunk)]
        if rest:
            pieces.append(b"%x\r\n" % rest + self.body[-rest:] + b"\r\n")
        return b"".join(pieces) + b"0\r\n" + self.trailers + b"\r\n"


@dataclass(frozen=True)
class GrpcCall:
    method: str
    """As in /loralane.v1.Generation/Generate."""
    messages: tuple[bytes, ...]
    client_streams: bool
    server_streams: bool
    metadata: tuple[tuple[str, Any], ...] = ()

    def with_key(self, key: str) -> GrpcCall:
        return replace(self, metadata=(("authorization", f"Bearer {key}"), *self.metadata)) if key else self


Request = HttpRequest | GrpcCall
BODY_SIZES = (2**12, 2**16, 2**20, 13 * 2**19)
"""Sizes in bytes to which a field of a body grows. At the last one no body is larger than the 8 MiB allowed."""
HEAD_SIZES = (2**10, 2**14, 2**20, 60 * 2**10)
"""Sizes for what is part of a request's head, whose limit is 64 KiB. The last one is what is tried first."""


@dataclass(frozen=True)
class Field:
    """Something of an operation that a caller fills."""

    operation: str
    path: str
    kind: str
    """What defines it: fields of one kind are found below several operations."""
    growths: Mapping[str, Callable[[int], Request]]
    key: str
    """The key of a caller who may call the operation."""
    sizes: tuple[int, ...] = BODY_SIZES
