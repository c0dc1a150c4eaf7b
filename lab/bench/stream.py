"""The chunks of a streamed completion, and the timed outcome of one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from lab.bench.plan import BenchRequest


class Delta(msgspec.Struct):
    """The `delta` of a chat's chunk: the part by which it extends the answer."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.reasoning_content or self.tool_calls)


class Choice(msgspec.Struct):
    text: str = ""
    delta: Delta | None = None
    """None means that the chunk belongs to a text completion and not to a chat."""
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    @property
    def tokens(self) -> int:
        """Number of answer tokens in the chunk: exact if the server sends token ids; else 1, or 0 for a chunk that only
        begins or ends the stream."""
        if self.token_ids is not None:
            return len(self.token_ids)
        if self.delta is not None:
            return int(bool(self.delta))
        return int(bool(self.text) or self.finish_reason is None)


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class ReportedUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None


class Chunk(msgspec.Struct):
    """One event of a streamed completion, with the fields that are measured."""

    choices: list[Choice] = []
    usage: ReportedUsage | None = None
    error: Any = None


@dataclass(slots=True)
class Stream:
    """The timed outcome of one request. All times are in seconds since the beginning of the run."""

    item: BenchRequest
    sent: float
    """When the client began with the request, before connecting."""
    ended: float = 0.0
    times: list[float] = field(default_factory=list)
    """When tokens arrived. Chunks that are read from the socket together are one arrival."""
    chunk_tokens: list[int] = field(default_factory=list)
    """Number of tokens in each arrival of `times`."""
    usage: ReportedUsage | None = None
    error: str | None = None
    """Kind of the failure. None means that the request did not fail."""

    @property
    def tokens(self) -> int:
        """Number of output tokens: as the server's usage counts them or, without usage, as they arrived."""
        counted = self.usage.completion_tokens if self.usage else None
        return sum(self.chunk_tokens) if counted is None else counted

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens: as the server's usage counts them or, without usage, those that were sent."""
        return (self.usage.prompt_tokens if self.usage else 0) or len(self.item.prompt)

    @property
    def cached(self) -> int | None:
        details = self.usage.prompt_tokens_details if self.usage else None
        return details.cached_tokens if details else None

    @property
    def late(self) -> float:
        """Seconds from the request's arrival time to when the client sent it, waits for `concurrency` included."""
        return self.sent - self.item.at

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent

    @property
    def e2e(self) -> float:
        return self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first. None means that there are fewer than two tokens."""
        return (self.times[-1] - self.times[0]) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies: seconds between consecutive arrivals."""
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]
