"""Commands and answers that an engine receives from outside its step loop and applies between two steps."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.messages.grammar import Grammar
from engine.core.messages.moves import MoveReport
from engine.core.messages.requests import AdapterHash, Request


@dataclass(frozen=True, slots=True)
class Submit:
    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class FetchKv:
    """Command to fetch a request's KV pages from its `kv_source` before the request itself is submitted."""

    request: Request


@dataclass(frozen=True, slots=True)
class AddAdapter:
    """Command that makes an adapter of `num_pages` device pages available to requests, or restores a dropped one."""

    adapter_hash: AdapterHash
    num_pages: int
    rank: int = 0
    """Largest rank among the adapter's projections, on which the duration of a step depends."""
    num_bytes: int = 0
    """Packed size in bytes."""
    path: str = ""
    """Folder that holds the adapter."""
    is_read: bool = False
    """True means that the adapter has just been read. If host memory is free, it is reserved for the adapter until a
    `FetchAnswer` comes, as if a plan had started a fetch."""
    invocation: tuple[int, ...] = ()
    """Tokens that activate the adapter; empty if it applies to all tokens."""


@dataclass(frozen=True, slots=True)
class DropAdapter:
    """Command to refuse new requests for an adapter, to unpin it, and to forget it when its last request has ended."""

    adapter_hash: AdapterHash


@dataclass(frozen=True, slots=True)
class AdapterFetched:
    """Executor's answer to an adapter fetch: the adapter is packed in the host memory that was reserved for it. The
    read took `seconds`."""

    adapter_hash: AdapterHash
    seconds: float


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """Executor's answer to an adapter fetch: the adapter cannot be read, even after retries, or packed, or its folder
    has changed. Waiting requests for it end with `reason` unless it is resident on the device."""

    adapter_hash: AdapterHash
    reason: str


@dataclass(frozen=True, slots=True)
class FetchCancelled:
    """Executor's answer to an adapter fetch: it was cancelled before the adapter was read. The reserved host memory is
    freed."""

    adapter_hash: AdapterHash


@dataclass(frozen=True, slots=True)
class GrammarReady:
    """Executor's answer about a grammar that it was to prepare: the grammar is ready, so that requests that need it may
    start."""

    grammar: Grammar
    num_bytes: int = 0
    """Memory in bytes that the prepared grammar holds."""


@dataclass(frozen=True, slots=True)
class GrammarFailed:
    """Executor's answer about a grammar that it was to prepare: the grammar is not valid, too large, or could not be
    compiled. Waiting requests for it end with `reason`."""

    grammar: Grammar
    reason: str


@dataclass(frozen=True, slots=True)
class MaskReady:
    """Executor's answer about a mask that a plan had it compute: the mask is there, and took `seconds` of a core's
    time."""

    request_id: str
    seconds: float


@dataclass(frozen=True, slots=True)
class MaskFailed:
    """Executor's answer about a mask that a plan had it compute: the request's grammar cannot be followed any further,
    for `reason`. Finding that out took `seconds` of a core's time."""

    request_id: str
    seconds: float
    reason: str


FetchAnswer = AdapterFetched | FetchFailed | FetchCancelled
GrammarAnswer = GrammarReady | GrammarFailed
MaskAnswer = MaskReady | MaskFailed
Answer = FetchAnswer | GrammarAnswer | MaskAnswer
Command = Submit | Abort | FetchKv | AddAdapter | DropAdapter | Answer | MoveReport
