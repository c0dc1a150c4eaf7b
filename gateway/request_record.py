"""What is written down of one request while it lives: for the books, for metrics, traces and the log."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from engine.core.types import Lane, TokenEvent
from gateway.core.trace_context import UNKNOWN, Ingress
from gateway.core.usage import NOTHING, Counts
from gateway.generation import Usage


class RequestRecord(Struct):
    """The story of one request, written while it lives; times in seconds on the gateway's monotonic clock."""

    id: str
    request_id: str
    tenant: str
    key_id: str
    model: str
    lane_asked: Lane | None
    lane: Lane | None  # None: turned away before anybody knew
    started: float
    ingress: Ingress = UNKNOWN
    trace_id: str = ""
    """The caller's, or of the trace that begins here."""
    adapter: str | None = None
    adapter_version: str = ""
    prompt_tokens: int = 0
    reserved_tokens: int = 0
    completion_tokens: int = 0
    n: int = 1
    """Answers that each prompt asks for."""
    max_tokens: int = 0
    """Tokens that an answer may have at most."""
    lengths: dict[int, int] = field(default_factory=dict)
    """Tokens of each answer so far."""
    cached: dict[int, int] = field(default_factory=dict)
    """Tokens of each prompt that were found in the prefix cache."""
    device: dict[int, float] = field(default_factory=dict)
    """Seconds of device time that each answer has taken."""
    reserving: float | None = None
    reserved: float | None = None  # the limiter was asked, and has answered
    submitted: float | None = None
    """Handed to the engine."""
    adapter_wait: float = 0.0
    """Seconds after submitted until the adapter had been read into host memory."""
    admitted: float | None = None
    """The engine began to work on it: long before its first event, which comes when a step has ended."""
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None
    finish: str = ""
    """stop, length, cancelled, or error."""
    status: int = 200
    """As HTTP would answer; 499 when the caller left."""
    error_code: str = ""
    error_metadata: Mapping[str, str] = field(default_factory=dict)
    shadowed: tuple[tuple[str, str], ...] = ()
    """Limits in shadow that would have refused it: kind of scope, and name."""
    moves: list[float] = field(default_factory=list)
    """Seconds without an engine process, each time that an answer went on in another one."""
    refund: bool = False
    """The engine failed or refused it: the caller pays nothing."""

    @property
    def usage(self) -> Usage:
        device_us = round(self.device_seconds * 1e6)
        return Usage(self.prompt_tokens, self.completion_tokens, sum(self.cached.values()), device_us)

    @property
    def used_tokens(self) -> int:
        """What to charge: nothing before the engine has it, then the prompt and all that was generated."""
        return 0 if self.submitted is None else self.prompt_tokens + self.completion_tokens

    @property
    def reserve_seconds(self) -> float | None:
        return _span(self.reserving, self.reserved)

    @property
    def device_seconds(self) -> float:
        return sum(self.device.values())

    def counts(self) -> Counts:
        """What to count of it, so far: the same tokens as are charged, and the same of nothing."""
        if self.submitted is None or self.refund:
            return NOTHING
        used = self.usage
        return Counts(1, used.prompt, used.cached, used.completion, used.device_us)

    @property
    def queue_seconds(self) -> float | None:
        """From the engine having it to the engine working on it."""
        return _span(self.submitted, self.admitted)

    @property
    def ttft_seconds(self) -> float | None:
        return _span(self.started, self.first_token)

    @property
    def prefill_seconds(self) -> float | None:
        """From the engine working on it to its first token."""
        return _span(self.admitted, self.first_token)

    @property
    def decode_seconds(self) -> float | None:
        """From its first token to its last."""
        return _span(self.first_token, self.last_token)

    @property
    def inference_seconds(self) -> float | None:
        """From the engine working on it to its last token."""
        return _span(self.admitted, self.last_token)

    @property
    def tpot_seconds(self) -> float | None:
        """Mean time of a token after the first; None for fewer than two."""
        span = _span(self.first_token, self.last_token)
        return None if span is None or self.completion_tokens < 2 else span / (self.completion_tokens - 1)

    @property
    def duration_seconds(self) -> float | None:
        return _span(self.started, self.ended)

    def note_tokens(self, index: int, count: int) -> None:
        """Count tokens of one answer."""
        self.completion_tokens += count
        self.lengths[index] = self.lengths.get(index, 0) + count

    def note_admission(self, event: TokenEvent, now: float) -> None:
        """What the engine's first event tells of the time before it."""
        if self.admitted is None:
            self.admitted = now if self.submitted is None else min(now, self.submitted + event.wait)
            self.adapter_wait = event.adapter_wait

    def note_cached(self, prompt: int, tokens: int) -> None:
        """What an answer to a prompt found cached. The first answer to run finds least, and leaves it to the others."""
        self.cached[prompt] = min(tokens, self.cached.get(prompt, tokens))

    def note_device(self, index: int, seconds: float) -> None:
        """What an answer has taken of the device so far; an event that ends one early does not say."""
        self.device[index] = max(seconds, self.device.get(index, 0.0))

    def note_move(self, seconds: float) -> None:
        """An answer has gone on in another engine process, after so many seconds without one."""
        self.moves.append(seconds)

    def end(self, finish: str, status: int, error_code: str = "") -> None:
        self.finish, self.status, self.error_code = finish, status, error_code


def _span(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
