"""How far a request has got: when it reached which stage, and what has been computed for it."""

from __future__ import annotations

import sys

from msgspec import Struct, field

from engine.core.messages.requests import ProposalCount, TokenEvent
from engine.core.speculate.prediction import PREDICTION
from gateway.core.usage import Counts
from gateway.requests.types import TokenUsage


class RequestTimes(Struct):
    """When a request got how far, in seconds on the gateway's monotonic clock. None means that it has not got that
    far."""

    started: float
    """When the caller's request arrived."""
    reserving: float | None = None
    """When the limiter was asked for the reservation."""
    reserved: float | None = None
    """When the limiter answered."""
    submitted: float | None = None
    """When the request was submitted, whether or not an engine took it at once."""
    adapter_wait: float = 0.0
    """Seconds from `submitted` until the adapter was in host memory."""
    admitted: float | None = None
    """When the engine began to work on the request, which is long before the first event: that comes at the end of a
    step."""
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None

    def note_admission(self, event: TokenEvent, now: float) -> None:
        """Record when the engine began to work on the request, and how long the request waited for its adapter, as the
        first event says, which came `now`."""
        self.admitted = now if self.submitted is None else min(now, self.submitted + event.wait)
        self.adapter_wait = event.adapter_wait

    def note_output(self, now: float) -> None:
        """Record that output came `now`."""
        self.first_token, self.last_token = self.first_token or now, now

    @property
    def reserve_seconds(self) -> float | None:
        return _span(self.reserving, self.reserved)

    @property
    def queue_seconds(self) -> float | None:
        """Seconds from submission until the engine began to work on the request. None means that it has not begun."""
        return _span(self.submitted, self.admitted)

    @property
    def ttft_seconds(self) -> float | None:
        return _span(self.started, self.first_token)

    @property
    def prefill_seconds(self) -> float | None:
        """Seconds from when the engine began to work on the request to the first token; None before that."""
        return _span(self.admitted, self.first_token)

    @property
    def decode_seconds(self) -> float | None:
        """Seconds from the first token to the last so far. None means that no token has come."""
        return _span(self.first_token, self.last_token)

    @property
    def inference_seconds(self) -> float | None:
        """Seconds from when the engine began to work on the request to the last token so far; None before the first."""
        return _span(self.admitted, self.last_token)

    @property
    def duration_seconds(self) -> float | None:
        return _span(self.started, self.ended)


class Work(Struct):
    """What has been computed for a request so far."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    """Output tokens that are reasoning, of answers that are complete."""
    lengths: dict[int, int] = field(default_factory=dict)
    """Output tokens of each answer so far, by the answer's number."""
    cached: dict[int, int] = field(default_factory=dict)
    """Number of tokens of each prompt that were found in the prefix cache, by the prompt's number."""
    device: dict[int, float] = field(default_factory=dict)
    """Device time of each answer in seconds, by the answer's number."""
    proposals: dict[int, tuple[ProposalCount, ...]] = field(default_factory=dict)
    """Numbers of proposed and of accepted speculative tokens of each answer so far, per proposer, by the answer's
    number."""

    def note_tokens(self, index: int, count: int) -> None:
        """Add `count` generated tokens to the totals of the request and of the answer with the number `index`."""
        self.completion_tokens += count
        self.lengths[index] = self.lengths.get(index, 0) + count

    def note_event(self, prompt: int, index: int, event: TokenEvent) -> None:
        """Record what an engine's event says about the answer `index` to the prompt `prompt`.

        Of the prompt's tokens in the prefix cache, the least count is kept: it is that of the first answer to run,
        whose pages the other answers then reuse. Of an answer's device time so far, the largest value is kept, because
        an event that ends an answer early does not report the time.
        """
        # Without min and max, which take as long as all else here: this runs for each token.
        if event.num_cached < self.cached.get(prompt, sys.maxsize):
            self.cached[prompt] = event.num_cached
        if event.device_seconds > self.device.get(index, -1.0):
            self.device[index] = event.device_seconds
        if event.proposals:
            self.proposals[index] = event.proposals

    @property
    def tokens(self) -> int:
        """Tokens of the prompts and of the answers."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def device_seconds(self) -> float:
        return sum(self.device.values())

    @property
    def usage(self) -> TokenUsage:
        """The usage, as the caller sees it."""
        accepted, proposed = self.proposed(PREDICTION)
        return TokenUsage(
            self.prompt_tokens,
            self.completion_tokens,
            sum(self.cached.values()),
            round(self.device_seconds * 1e6),
            self.reasoning_tokens,
            accepted,
            proposed - accepted,
        )

    def counts(self) -> Counts:
        """Return the usage of one request, as the tenant's usage counts it."""
        used = self.usage
        return Counts(1, used.prompt, used.cached, used.completion, used.device_us)

    def proposed(self, *proposers: str) -> tuple[int, int]:
        """Return the numbers of accepted and of proposed speculative tokens, summed over all answers, from these
        proposers or, if none is named, from all."""
        counts = [one for of_answer in self.proposals.values() for one in of_answer]
        counts = [one for one in counts if not proposers or one.proposer in proposers]
        return sum(one.accepted for one in counts), sum(one.proposed for one in counts)


def _span(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
