"""What a streamed completion consists of, and what became of one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.bench.plan import Item


class Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    @property
    def tokens(self) -> int:
        """Exact where the server sends ids; else one for every chunk that is not just the end."""
        if self.token_ids is not None:
            return len(self.token_ids)
        return int(bool(self.text) or self.finish_reason is None)


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None


class Chunk(msgspec.Struct):
    """What of a completion chunk is measured."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


@dataclass(slots=True)
class Stream:
    """What became of one request. Times in seconds since the beginning of the run."""

    item: Item
    sent: float
    """When it was taken in hand, before connecting."""
    ended: float = 0.0
    times: list[float] = field(default_factory=list)
    """Of arrivals with tokens; chunks that arrive in one piece are one arrival."""
    chunk_tokens: list[int] = field(default_factory=list)
    """Tokens of each arrival."""
    usage: Usage | None = None
    error: str | None = None
    """Its kind, if it failed."""

    @property
    def tokens(self) -> int:
        """As the server counted them, or else as they were seen."""
        counted = self.usage.completion_tokens if self.usage else None
        return sum(self.chunk_tokens) if counted is None else counted

    @property
    def cached(self) -> int | None:
        details = self.usage.prompt_tokens_details if self.usage else None
        return details.cached_tokens if details else None

    @property
    def late(self) -> float:
        """How much after its time it was sent: the client's own doing."""
        return self.sent - self.item.at

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent

    @property
    def e2e(self) -> float:
        return self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """Mean time per token after the first; None for a single one."""
        return (self.times[-1] - self.times[0]) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies: between arrivals."""
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]
