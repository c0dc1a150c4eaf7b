"""What a generation is, in words no protocol owns: HTTP and gRPC translate to and from these."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, Protocol, TypeVar

from engine.core.types import FinishReason, Lane, SamplingParams, TokenEvent, TokenLogprobs
from gateway.core.lanes import lane_name
from gateway.core.routing import ModelQuery
from gateway.tokenizer import Detokenizer, Message, StopMatcher, ToolSchema


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages for the model's chat template."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...] = ()
    """That the model may call."""


PromptInput = Chat | str | tuple[int, ...]
"""A chat, a text to continue, or token ids to continue."""

Finish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One call of a caller: every prompt is answered `n` times."""

    model: ModelQuery
    inputs: tuple[PromptInput, ...]
    request_id: str
    """The caller's or the protocol's; need not be unique."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Its max_tokens and seed are set by the gateway from the two fields below."""
    max_tokens: int | None = None
    """None: as many as the context leaves room for, up to `default_max_tokens`."""
    seed: int | None = None
    """None: a different draw every time. Answer i of a prompt draws from seed + i."""
    default_max_tokens: int | None = None
    """None: the gateway's own default."""
    reserve_tokens: int = 0
    """Output tokens to reserve for each answer, where a caller names more than max_tokens."""
    stop: tuple[str, ...] = ()
    whole: bool = False
    """Nobody waits for single tokens: a chunk may have all that have come."""
    n: int = 1
    lane: Lane | None = None
    """None: the tenant's default."""
    priority: int = 0
    """Lower is sooner, inside the lane."""
    deadline: float | None = None
    """Seconds this caller will wait for the whole answer, if less than what the gateway allows."""
    ttft: float | None = None
    """Seconds to the first token it asks for; None: the lane's goal."""
    itl: float | None = None
    """Seconds between tokens it asks for; None: the lane's goal."""


@dataclass(frozen=True, slots=True)
class Usage:
    """In tokens. A prompt counts once, however many answers it gets."""

    prompt: int
    completion: int
    cached: int
    """Of the prompt, found in the prefix cache."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """Known before the first token: what goes into response headers and initial metadata."""

    id: str
    """Unique to this generation."""
    request_id: str
    created: int
    """Unix time in seconds."""
    model: str
    """As the caller named it."""
    lane: Lane
    """The effective one."""
    fingerprint: str
    prompts: tuple[tuple[int, ...], ...]
    """Token ids."""
    rate_headers: Mapping[str, str]

    def headers(self) -> dict[str, str]:
        return {**self.rate_headers, "x-loralane-lane": lane_name(self.lane)}


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """News of one answer: what one engine event brought."""

    index: int
    """Answer number: prompt number * n + number among the prompt's answers."""
    text: str = ""
    """May be empty while a character or a possible stop string is incomplete."""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token id, if asked for."""
    silent: bool = False
    """The last token is a stop token: it counts, and has no text."""
    finish_reason: Finish | None = None
    """Set on the last chunk of every answer."""
    usage: Usage | None = None
    """Of the whole request; set on its very last chunk."""
    more: bool = False
    """Another chunk of this answer is here already: what is written may be written with it."""


@dataclass(frozen=True, slots=True)
class Generation:
    """An admitted request: `async for chunk in generation`, once."""

    admitted: Admitted
    chunks: AsyncIterator[GenerationChunk]

    def __aiter__(self) -> AsyncIterator[GenerationChunk]:
        return self.chunks


@dataclass(slots=True)
class RequestRecord:
    """The story of one request, written while it lives; times in seconds on the gateway's monotonic clock."""

    id: str
    request_id: str
    tenant: str
    key_id: str
    model: str
    lane_asked: Lane | None
    lane: Lane
    started: float
    adapter: str | None = None
    adapter_version: str = ""
    prompt_tokens: int = 0
    reserved_tokens: int = 0
    completion_tokens: int = 0
    cached: dict[int, int] = field(default_factory=dict)
    """Tokens of each prompt that were found in the prefix cache."""
    submitted: float | None = None
    """Handed to the engine."""
    admitted: float | None = None
    """The engine began to work on it."""
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
    refund: bool = False
    """The engine failed or refused it: the caller pays nothing."""

    @property
    def usage(self) -> Usage:
        return Usage(self.prompt_tokens, self.completion_tokens, sum(self.cached.values()))

    @property
    def used_tokens(self) -> int:
        """What to charge: nothing before the engine has it, then the prompt and all that was generated."""
        return 0 if self.submitted is None else self.prompt_tokens + self.completion_tokens

    @property
    def queue_seconds(self) -> float | None:
        """From the engine having it to the engine working on it."""
        return _span(self.submitted, self.admitted)

    @property
    def ttft_seconds(self) -> float | None:
        return _span(self.started, self.first_token)

    @property
    def tpot_seconds(self) -> float | None:
        """Mean time of a token after the first; None for fewer than two."""
        span = _span(self.first_token, self.last_token)
        return None if span is None or self.completion_tokens < 2 else span / (self.completion_tokens - 1)

    @property
    def duration_seconds(self) -> float | None:
        return _span(self.started, self.ended)

    def note_cached(self, prompt: int, tokens: int) -> None:
        """What an answer to a prompt found cached. The first answer to run finds least, and leaves it to the others."""
        self.cached[prompt] = min(tokens, self.cached.get(prompt, tokens))

    def end(self, finish: str, status: int, error_code: str = "") -> None:
        self.finish, self.status, self.error_code = finish, status, error_code


def _span(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


class Observer(Protocol):
    """Watches requests go by: metrics and the request log."""

    def inter_token(self, lane: Lane, seconds: float) -> None:
        """Time between two events with tokens of one answer."""

    def finished(self, record: RequestRecord) -> None:
        """Called exactly once for each request, however it ended."""


class Answer:
    """Turns the engine's events for one answer into chunks: detokenises, matches stop strings, hides the stop token."""

    def __init__(self, index: int, detokenizer: Detokenizer, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._index = index
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stop) if stop else None
        self._min_tokens = min_tokens
        self._num_tokens = 0

    def absorb(self, event: TokenEvent, more: bool = False) -> GenerationChunk:
        """The chunk's finish_reason is set when a stop string or the event ends the answer.

        `more`: events that come after this one are here already.
        """
        # An engine's STOP means that the last token is an EOS or a stop token: it counts, but has no text.
        visible = event.tokens[:-1] if event.finish_reason is FinishReason.STOP else event.tokens
        text, num_used, stopped = self._push(visible)
        if stopped:
            return self._chunk(event, text, num_used, "stop")
        if event.finish_reason is None:
            return GenerationChunk(self._index, text, event.tokens, event.logprobs, more=more)
        tail, stopped = self._match(self._detokenizer.flush())
        if self._matcher is not None and not stopped:
            tail += self._matcher.flush()
        silent = event.finish_reason is FinishReason.STOP
        finish: Finish = "stop" if stopped or silent else "length"
        return self._chunk(event, text + tail, len(event.tokens), finish, silent)

    def _push(self, token_ids: Sequence[int]) -> tuple[str, int, bool]:
        """Text to show, how many of the tokens led to it, and whether a stop string ended it."""
        if self._matcher is None:
            return self._detokenizer.push(token_ids), len(token_ids), False
        shown: list[str] = []
        for count, token_id in enumerate(token_ids, 1):
            self._num_tokens += 1
            text, stopped = self._match(self._detokenizer.push((token_id,)))
            shown.append(text)
            if stopped:
                return "".join(shown), count, True
        return "".join(shown), len(token_ids), False

    def _match(self, text: str) -> tuple[str, bool]:
        if self._matcher is None or self._num_tokens <= self._min_tokens:
            return text, False
        return self._matcher.push(text)

    def _chunk(
        self, event: TokenEvent, text: str, num_tokens: int, finish: Finish | None, silent: bool = False
    ) -> GenerationChunk:
        return GenerationChunk(
            self._index, text, event.tokens[:num_tokens], event.logprobs[:num_tokens], silent, finish
        )


def united(events: Sequence[TokenEvent]) -> TokenEvent:
    """Events of one answer, in order, as one."""
    return events[-1]._replace(
        tokens=tuple(chain.from_iterable(event.tokens for event in events)),
        logprobs=tuple(chain.from_iterable(event.logprobs for event in events)),
        num_cached=min(event.num_cached for event in events),
    )


T = TypeVar("T")


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Items of all streams as they come. Closing it closes every stream; the first error of any ends it."""
    queue: asyncio.Queue[tuple[T] | BaseException | None] = asyncio.Queue()
    pumps = [asyncio.create_task(_pump(stream, queue)) for stream in streams]
    try:
        running = len(pumps)
        while running:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield item[0]
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(stream: AsyncGenerator[T, None], queue: asyncio.Queue[tuple[T] | BaseException | None]) -> None:
    end: BaseException | None = None
    try:
        async with aclosing(stream):
            async for item in stream:
                queue.put_nowait((item,))
    except Exception as error:
        end = error
    queue.put_nowait(end)
