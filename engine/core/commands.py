"""What an engine is told from outside: its inbox, read between two steps."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.grammars import Grammar
from engine.core.types import AdapterId, Request


@dataclass(frozen=True, slots=True)
class Submit:
    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class AddAdapter:
    """An adapter may be used from now on; a folder holds it."""

    adapter: AdapterId
    num_pages: int
    rank: int = 0
    """The largest of its projections: what a step's time depends on."""
    num_bytes: int = 0
    """Packed."""
    path: str = ""
    is_read: bool = False
    """It has just been read: free host memory is reserved for it until a FetchAnswer, as if a plan had fetched it."""


@dataclass(frozen=True, slots=True)
class DropAdapter:
    """No new requests for this adapter; forget it when the last one has ended."""

    adapter: AdapterId


@dataclass(frozen=True, slots=True)
class AdapterFetched:
    """It is packed in host memory, in the room that was reserved for it."""

    adapter: AdapterId
    seconds: float


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """It cannot be read, however often it was tried; whoever waits for it is told the reason."""

    adapter: AdapterId
    reason: str


@dataclass(frozen=True, slots=True)
class FetchCancelled:
    """It was not read after all."""

    adapter: AdapterId


@dataclass(frozen=True, slots=True)
class GrammarReady:
    """Requests that need the grammar may start."""

    grammar: Grammar
    num_bytes: int = 0
    """Memory that it holds."""


@dataclass(frozen=True, slots=True)
class GrammarFailed:
    """It is none, or too much; whoever waits for it is told the reason."""

    grammar: Grammar
    reason: str


FetchAnswer = AdapterFetched | FetchFailed | FetchCancelled
GrammarAnswer = GrammarReady | GrammarFailed
Answer = FetchAnswer | GrammarAnswer
Command = Submit | Abort | AddAdapter | DropAdapter | Answer
