"""Requests, chunks and results of a generation, independent of the protocol, and how the chunks of several answers are
merged. HTTP and gRPC convert to and from these types."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Literal, NamedTuple, TypeVar

from msgspec import Struct

from engine.core.types import FinishReason, Lane, Pooling, SamplingParams, TokenEvent, TokenLogprobs
from gateway.core.lanes import lane_name
from gateway.core.routing import ModelQuery
from gateway.core.trace_context import UNKNOWN, Ingress
from gateway.requests.prompt_scores import PromptReader, PromptScores, join_scores
from gateway.text.chat_template import DEFAULT_OPTIONS, Message, TemplateOptions, ToolSchema
from gateway.text.reasoning.parser import ReasoningParser, Split
from gateway.text.tokenizer import Detokenizer, StopMatcher
from gateway.text.tools.rule import FREE, ToolRule


class Chat(Struct, frozen=True):
    """Messages for the model's chat template, with tools, the rule for calling them, and options for rendering."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...] = ()
    """Tools that the model may call."""
    rule: ToolRule = FREE
    options: TemplateOptions = DEFAULT_OPTIONS


PromptInput = Chat | str | tuple[int, ...]
"""A chat, a text to continue, or token ids to continue."""

Finish = Literal["stop", "length", "pooled"]
"""How an answer ended; `pooled` means that it is a vector."""


class GenerateRequest(Struct, frozen=True):
    """A request of a caller as `Gateway.generate` takes it, with one or several prompts. Each is answered `n` times."""

    model: ModelQuery
    prompts: tuple[PromptInput, ...]
    request_id: str
    """Id that the caller or the protocol chose; it need not be unique."""
    sampling: SamplingParams = SamplingParams()
    """Sampling parameters. The gateway sets their max_tokens and seed from the fields `max_tokens` and `seed` below."""
    grammar_field: str | None = None
    """Name of the request field that the grammar in `sampling` came from, for error messages."""
    max_tokens: int | None = None
    """Maximum output tokens of an answer, cut to the room left in the context. 0 generates nothing, so that the engine
    is asked only for log probabilities of the prompt or a vector. None means `default_max_tokens`."""
    seed: int | None = None
    """Seed of the random draws; answer i of a prompt uses seed + i. None means a random seed."""
    default_max_tokens: int | None = None
    """Maximum output tokens if `max_tokens` is None. None means the rest of the context."""
    reserve_tokens: int = 0
    """Minimum output tokens to reserve for each answer, for callers that name a larger limit besides max_tokens."""
    stop: tuple[str, ...] = ()
    keep_stop: bool = False
    """True means that the answer's text includes the stop string or the stop token that ended the answer."""
    coalesce: bool = False
    """True means that the caller does not need single tokens: a chunk may hold all tokens that have come."""
    n: int = 1
    lane: Lane | None = None
    """Lane that the caller asks for. None means the tenant's default."""
    priority: int = 0
    """Priority within the lane; a lower value is served sooner."""
    deadline: float | None = None
    """Seconds that the caller will wait for the whole answer. The gateway's own limit applies if it is shorter, unless
    `ignore_server_timeout` is set."""
    ignore_server_timeout: bool = False
    """True means that only `deadline` limits the whole answer, even if it is longer than the gateway's own limit."""
    stall: float | None = None
    """Seconds that the caller will wait for a token of any answer after the first one. None means no such limit."""
    thinking_budget: int | None = None
    """Maximum tokens of each answer's reasoning, at least 1. None means no such limit."""
    ttft: float | None = None
    """TTFT that the request asks for, in seconds. None means the lane's goal."""
    itl: float | None = None
    """ITL that the request asks for, in seconds. None means the lane's goal."""
    cache_salt: str = ""
    """Only requests of the tenant with the same salt share cached prefixes. Empty means no salt."""
    pooling: Pooling | None = None
    """Asks for a vector of each prompt in place of answers; `max_tokens` must be 0. None means that answers are
    generated."""
    prompt_fields: tuple[str, ...] = ()
    """Names of the request fields that the prompts came from, for error messages; empty means messages or prompt."""
    ingress: Ingress = UNKNOWN

    @property
    def asked_tokens(self) -> int | None:
        """Maximum output tokens of an answer, from the caller or the protocol. None means the rest of the context."""
        return self.default_max_tokens if self.max_tokens is None else self.max_tokens

    def prompt_field(self, index: int) -> str:
        """Return the name of the request field that a prompt came from."""
        if self.prompt_fields:
            return self.prompt_fields[index]
        return "messages" if isinstance(self.prompts[index], Chat) else "prompt"

    @property
    def offering(self) -> Chat | None:
        """First chat of the request that offers tools. None means that no tools are offered."""
        return next((prompt for prompt in self.prompts if isinstance(prompt, Chat) and prompt.tools), None)


class TokenUsage(Struct, frozen=True):
    """Usage of a request: numbers of tokens, and device time. A prompt counts once, however many answers it gets."""

    prompt: int
    completion: int
    cached: int
    """Prompt tokens that were found in the prefix cache."""
    device_us: int = 0
    """Device time of the answers, in microseconds."""
    reasoning: int = 0
    """Tokens of `completion` that are reasoning."""


class Admitted(Struct, frozen=True):
    """Data about a request, known before its first token, for response bodies, HTTP headers and initial metadata."""

    id: str
    """Unique to this generation."""
    request_id: str
    created: int
    """Unix time in seconds."""
    model: str
    """Model name as the caller wrote it."""
    lane: Lane
    """Lane that serves the request; it may differ from the lane that the caller asked for."""
    fingerprint: str
    prompt_ids: tuple[tuple[int, ...], ...]
    """Token ids of each prompt."""
    rate_headers: Mapping[str, str]

    def headers(self) -> dict[str, str]:
        return {**self.rate_headers, "x-loralane-lane": lane_name(self.lane)}


class GenerationChunk(NamedTuple):
    """A part of one answer: the text and tokens of one engine event, or of several that were merged or joined."""

    answer: int
    """Number of the answer in its request: prompt number * n + number among the prompt's answers."""
    text: str = ""
    """New text of the answer. It may be empty while a character or a possible stop string is incomplete."""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Log probabilities, one item for each token id; empty if the caller did not ask for them."""
    silent: bool = False
    """True means that the last token is a stop token, which counts as a token but has no text."""
    finish_reason: Finish | None = None
    """Set on the last chunk of every answer."""
    usage: TokenUsage | None = None
    """Usage of the whole request; set on the very last chunk of the request."""
    more: bool = False
    """True means that another chunk of this answer is here already, so that both may be written to the caller
    together."""
    reasoning: str = ""
    """New text of the answer's reasoning, which comes before its text."""
    stop_string: str | None = None
    """The stop string that ended the answer, set on its last chunk. None means that something else ended it."""
    vector: bytes = b""
    """The vector of a prompt, in fp32, little-endian: the whole answer of a request for vectors."""
    prompt_scores: PromptScores = PromptScores()
    """The next tokens of the prompt, with their log probabilities; empty if the caller did not ask for them."""

    @property
    def has_output(self) -> bool:
        """Return whether the chunk has tokens, log probabilities of the prompt, or a vector."""
        return bool(self.token_ids or self.prompt_scores.rows or self.vector)


class Generation(Struct):
    """An admitted request and its stream of chunks: `async for chunk in generation` works once."""

    admitted: Admitted
    opening: GenerationChunk | None
    """First chunk of the stream; None after it has been taken."""
    rest: AsyncIterator[GenerationChunk]

    def __aiter__(self) -> AsyncIterator[GenerationChunk]:
        return self

    async def __anext__(self) -> GenerationChunk:
        if self.opening is None:
            return await anext(self.rest)
        opening, self.opening = self.opening, None
        return opening


class AnswerDecoder:
    """Turns the engine's events for one answer into chunks: detokenises, matches stop strings, hides the stop token,
    separates reasoning from text."""

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        request: GenerateRequest,
        reasoning: ReasoningParser | None = None,
        prompt: PromptReader | None = None,
        call_marks: Sequence[str] = (),
    ) -> None:
        """Initialize the decoder.

        Args:
            index: the answer's number.
            detokenizer: turns this answer's tokens into text, with the marks of reasoning and `call_marks`.
            request: says what ends the answer and what is shown of its end.
            reasoning: splits this answer; None means that everything is text.
            prompt: reads the log probabilities of the prompt; None means that the request asks for none.
            call_marks: marks of tool calls, which the text may have after the reasoning.
        """
        self._index = index
        self._detokenizer = detokenizer
        self._reasoning = reasoning
        self._call_marks = call_marks
        self._awaited: str | None = None
        """The mark of reasoning that the detokenizer keeps. None means that it keeps all."""
        self._prompt = prompt
        self._keep_stop = request.keep_stop
        self._matcher = StopMatcher(request.stop, keep=request.keep_stop) if request.stop else None
        self._min_tokens = request.sampling.min_tokens
        self._num_tokens = 0

    def decode(self, event: TokenEvent, more: bool = False) -> GenerationChunk:
        """Convert an event to a chunk, whose finish_reason is set if a stop string or the event ends the answer; tokens
        after a stop string are dropped. `more` says that later events of this answer are here already."""
        chunk = self._decode(event, more)
        return chunk if self._prompt is None else chunk._replace(prompt_scores=self._prompt.read(event.prompt_logprobs))

    @property
    def lacks_scores(self) -> bool:
        """Return whether log probabilities of the prompt that the request asks for have not come yet."""
        return self._prompt is not None and not self._prompt.is_complete

    def _decode(self, event: TokenEvent, more: bool) -> GenerationChunk:
        if event.finish_reason is FinishReason.POOLED:
            return GenerationChunk(self._index, finish_reason="pooled", vector=event.vector)
        # An engine's STOP means that the last token is an EOS or a stop token: it counts, but usually has no text.
        silent = event.finish_reason is FinishReason.STOP and not self._keep_stop
        visible = event.tokens[:-1] if silent else event.tokens
        shown, num_used, stopped = self._push(visible)
        if stopped:
            return self._last_chunk(event, shown, num_used, "stop")
        if event.finish_reason is None:
            text, reasoning = _joined(shown)
            return GenerationChunk(self._index, text, event.tokens, event.logprobs, more=more, reasoning=reasoning)
        tail, stopped = self._match(self._detokenizer.flush())
        if self._matcher is not None and not stopped:
            tail += self._matcher.flush()
        finish: Finish = "stop" if stopped or event.finish_reason is FinishReason.STOP else "length"
        return self._last_chunk(event, [*shown, self._split(tail)], len(event.tokens), finish, silent)

    @property
    def reasoning_tokens(self) -> int:
        """Number of the answer's tokens so far that are reasoning."""
        return self._reasoning.num_tokens if self._reasoning else 0

    def _push(self, token_ids: Sequence[int]) -> tuple[list[Split], int, bool]:
        """Detokenize tokens. Return the text to show, how many of the tokens were used, and whether a stop string ended
        the answer at the last of these. Tokens are taken one by one where one of them may end the answer or its
        reasoning."""
        self._listen()
        if self._matcher is None and (self._reasoning is None or self._reasoning.ended):
            return [self._split(self._detokenizer.push(token_ids))], len(token_ids), False
        shown: list[Split] = []
        for count, token_id in enumerate(token_ids, 1):
            self._num_tokens += 1
            text, stopped = self._match(self._detokenizer.push((token_id,)))
            shown.append(self._split(text, 1))
            self._listen()
            if stopped:
                return shown, count, True
        return shown, len(token_ids), False

    def _listen(self) -> None:
        """Let the detokenizer keep only those marks that mean something at this point of the answer."""
        if self._reasoning is not None and self._reasoning.awaited != self._awaited:
            self._awaited = self._reasoning.awaited
            self._detokenizer.keep((self._awaited, *(() if self._reasoning.is_inside else self._call_marks)))

    def _split(self, text: str, num_tokens: int = 0) -> Split:
        return Split("", text) if self._reasoning is None else self._reasoning.push(text, num_tokens)

    def _match(self, text: str) -> tuple[str, bool]:
        if self._matcher is None or self._num_tokens <= self._min_tokens:
            return text, False
        return self._matcher.push(text)

    def _last_chunk(
        self, event: TokenEvent, shown: Sequence[Split], num_tokens: int, finish: Finish, silent: bool = False
    ) -> GenerationChunk:
        text, reasoning = _joined([*shown, self._reasoning.flush()] if self._reasoning else shown)
        return GenerationChunk(
            answer=self._index,
            text=text,
            token_ids=event.tokens[:num_tokens],
            logprobs=event.logprobs[:num_tokens],
            silent=silent,
            finish_reason=finish,
            reasoning=reasoning,
            stop_string=self._matcher.found if self._matcher else None,
        )


def _joined(shown: Sequence[Split]) -> tuple[str, str]:
    """Return the whole text and the whole reasoning of an answer's pieces."""
    return "".join(piece.text for piece in shown), "".join(piece.reasoning for piece in shown)


T = TypeVar("T")


def join_answers(chunks: Sequence[GenerationChunk]) -> list[GenerationChunk]:
    """Return one chunk for each answer, ordered by the answer's number, joined from all chunks of all answers. The
    chunks of each answer must be in order. `usage` is dropped."""
    answers: dict[int, list[GenerationChunk]] = {}
    for chunk in chunks:
        answers.setdefault(chunk.answer, []).append(chunk)
    return [join_chunks(answers[index]) for index in sorted(answers)]


def join_chunks(chunks: Sequence[GenerationChunk]) -> GenerationChunk:
    """Return one chunk that joins all chunks of one answer, given in order. `usage` is dropped."""
    return GenerationChunk(
        answer=chunks[0].answer,
        text="".join(chunk.text for chunk in chunks),
        reasoning="".join(chunk.reasoning for chunk in chunks),
        prompt_scores=join_scores([chunk.prompt_scores for chunk in chunks]),
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        logprobs=tuple(values for chunk in chunks for values in chunk.logprobs),
        silent=chunks[-1].silent,
        finish_reason=chunks[-1].finish_reason,
        stop_string=chunks[-1].stop_string,
    )


async def merge_streams(streams: Sequence[AsyncGenerator[T, None]], most: int) -> AsyncGenerator[T, None]:
    """Yield the items of all streams as they come, reading them in concurrent tasks, at most `most` streams at a time,
    in their order. The first error of any stream is raised; that, the end, or closing the merged stream closes every
    stream that was begun."""
    queue: asyncio.Queue[tuple[T] | BaseException | None] = asyncio.Queue()
    turns = asyncio.Semaphore(most)
    pumps = [asyncio.create_task(_pump(stream, queue, turns)) for stream in streams]
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


async def _pump(
    stream: AsyncGenerator[T, None], queue: asyncio.Queue[tuple[T] | BaseException | None], turns: asyncio.Semaphore
) -> None:
    end: BaseException | None = None
    try:
        async with turns, aclosing(stream):
            async for item in stream:
                queue.put_nowait((item,))
    except Exception as error:
        end = error
    queue.put_nowait(end)
