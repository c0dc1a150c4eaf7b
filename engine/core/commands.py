"""Commands and answers that an engine receives from outside and applies between two steps."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.grammars import Grammar
from engine.core.types import AdapterHash, Request


@dataclass(frozen=True, slots=True)
class Submit:
    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class AddAdapter:
    """Make an adapter available to requests."""

    adapter_hash: AdapterHash
    num_pages: int
    rank: int = 0
    """Largest rank among the adapter's projections, on which the duration of a step depends."""
    num_bytes: int = 0
    """Packed size in bytes."""
    path: str = ""
    """Folder that holds the adapter."""
    is_read: bool = False
    """The adapter has just been read. If host memory is free, it is reserved for the adapter until a `FetchAnswer`
    comes, as if a plan had started a fetch."""


@dataclass(frozen=True, slots=True)
class DropAdapter:
    """Refuse new requests for an adapter, and forget it when its last request has ended."""

    adapter_hash: AdapterHash


@dataclass(frozen=True, slots=True)
class AdapterFetched:
    """An adapter has been fetched: it is packed in host memory, in the room that was reserved for it."""

    adapter_hash: AdapterHash
    seconds: float


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """An adapter cannot be read, even after retries. The requests that wait for it end with the reason."""

    adapter_hash: AdapterHash
    reason: str


@dataclass(frozen=True, slots=True)
class FetchCancelled:
    """The fetch of an adapter was cancelled before the adapter was read."""

    adapter_hash: AdapterHash


@dataclass(frozen=True, slots=True)
class GrammarReady:
    """A grammar is prepared, so that requests that need it may start."""

    grammar: Grammar
    num_bytes: int = 0
    """Memory in bytes that the prepared grammar holds."""


@dataclass(frozen=True, slots=True)
class GrammarFailed:
    """The text is not a valid grammar, or it is too large. The requests that wait for it end with the reason."""

    grammar: Grammar
    reason: str


FetchAnswer = AdapterFetched | FetchFailed | FetchCancelled
GrammarAnswer = GrammarReady | GrammarFailed
Answer = FetchAnswer | GrammarAnswer
Command = Submit | Abort | AddAdapter | DropAdapter | Answer
