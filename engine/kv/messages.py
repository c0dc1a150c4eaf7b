"""What engines say to each other about KV pages, version 1. Integers are big-endian; checksums are zlib's CRC-32.

both      hello: magic, version (u16), length of the JSON (u16), JSON
receiver  the hello says what it wants (see `Want`), and the keys follow, 16 bytes each
sender    the hello says what it does (see `Answer`); then a frame for each page, in order, and one for the end:
          kind (u8), number of the page or reason of the end (u32), checksum of the page (u32); its bytes follow or
          are in shared memory (transports.py)
receiver  a byte for each page that it has taken
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import TypeVar

import msgspec

from engine.core.memory.prefix import KEY_BYTES
from engine.core.messages.moves import FetchEnd
from engine.core.messages.requests import PrefixKey
from engine.kv.line import Line, MoveFailed

MAGIC, VERSION = b"LLKV", 1
MOST_KEYS = 1 << 16
"""Maximum number of pages of one move: those of a million tokens, at 16 a page."""
MOST_HELLO = 4096
"""Maximum length in bytes of a hello's JSON."""
TAKEN = b"\x01"
HELLO, FRAME = Struct(">4sHH"), Struct(">BII")


class Kind(IntEnum):
    PAGE = 1
    END = 2


class Reason(IntEnum):
    """Why the sender of KV pages ends a move: all pages were sent, or it does not have the rest."""

    DONE = 0
    GONE = 1


class Want(msgspec.Struct, frozen=True):
    """Content of the receiver's hello: which KV pages it wants from the sender, another engine."""

    identity: str
    """The receiver's `EngineInfo.kv_identity`. A sender with another one refuses."""
    keys: int
    """Number of pages that it wants, whose prefix keys follow the hello."""
    computes: bool
    """True means that the receiver also wants pages that the sender has yet to compute (see `KvSource.computes`)."""
    seconds: float
    """Seconds for which it waits."""


class Answer(msgspec.Struct, frozen=True):
    """Content of the sender's hello, its answer to `Want`: whether and how it sends the KV pages."""

    refusal: str
    """Why it sends nothing; empty if it sends."""
    window: int
    """Number of pages that it sends before the receiver has taken the first of them."""
    shared: bool
    """True means that pages come in shared memory, whose file descriptor comes with this hello."""


T = TypeVar("T", Want, Answer)


def hello(content: Want | Answer) -> bytes:
    text = msgspec.json.encode(content)
    return HELLO.pack(MAGIC, VERSION, len(text)) + text


def read_hello(line: Line, kind: type[T], head: bytes = b"") -> T:
    """Receive the hello of the other engine. `head` is its fixed-size header if that has come already. Raises
    MoveFailed: REFUSED for another version, CORRUPT for anything else that is not a hello of this kind."""
    magic, version, length = HELLO.unpack(head or line.receive(HELLO.size))
    if magic != MAGIC or length > MOST_HELLO:
        raise MoveFailed(FetchEnd.CORRUPT, "the other side does not speak the protocol of KV pages")
    if version != VERSION:
        raise MoveFailed(FetchEnd.REFUSED, f"the other engine speaks version {version}, this one {VERSION}")
    try:
        return msgspec.json.decode(line.receive(length), type=kind)
    except msgspec.MsgspecError as error:
        raise MoveFailed(FetchEnd.CORRUPT, f"the other side's hello cannot be read: {error}") from error


def read_keys(line: Line, count: int) -> tuple[PrefixKey, ...]:
    """Receive the `count` prefix keys that follow a receiver's hello, of the KV pages that it wants. Raises MoveFailed
    if they do not arrive, or if `count` is 0 or above `MOST_KEYS`."""
    if not 0 < count <= MOST_KEYS:
        raise MoveFailed(FetchEnd.CORRUPT, f"{count} keys")
    data = line.receive(count * KEY_BYTES)
    return tuple(data[start : start + KEY_BYTES] for start in range(0, len(data), KEY_BYTES))
