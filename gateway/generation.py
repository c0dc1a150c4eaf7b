"""What a generation is, in words no protocol owns: HTTP and gRPC translate to and from these."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Literal, NamedTuple

from msgspec import Struct

from engine.core.types import FinishReason, Lane, SamplingParams, TokenEvent, TokenLogprobs
from gateway.chat_template import DEFAULT_OPTIONS, Message, TemplateOptions, ToolSchema
from gateway.core.lanes import lane_name
from gateway.core.routing import ModelQuery
from gateway.core.trace_context import UNKNOWN, Ingress
from gateway.tokenizer import Detokenizer, StopMatcher
from gateway.tools.rule import FREE, ToolRule


class Chat(Struct, frozen=True):
    """Messages for the model's chat template."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...] = ()
    """That the model may call."""
    rule: ToolRule = FREE
    options: TemplateOptions = DEFAULT_OPTIONS


PromptInput = Chat | str | tuple[int, ...]
"""A chat, a text to continue, or token ids to continue."""

Finish = Literal["stop", "length"]


class GenerateRequest(Struct, frozen=True):
    """One call of a caller: every prompt is answered `n` times."""

    model: ModelQuery
    inputs: tuple[PromptInput, ...]
    request_id: str
    """The caller's or the protocol's; need not be unique."""
    sampling: SamplingParams = SamplingParams()
    """Its max_tokens and seed are set by the gateway from the two fields below."""
    grammar_field: str | None = None
    """What the caller calls the grammar in `sampling`, if there is one."""
    max_tokens: int | None = None
    """More than the context has room for is cut to that; 0 generates nothing. None means `default_max_tokens`."""
    seed: int | None = None
    """None: a different draw every time. Answer i of a prompt draws from seed + i."""
    default_max_tokens: int | None = None
    """None means the rest of the context."""
    reserve_tokens: int = 0
    """Output tokens to reserve for each answer, where a caller names more than max_tokens."""
    stop: tuple[str, ...] = ()
    keep_stop: bool = False
    """The answer's text ends with the stop string or the stop token that ended it."""
    whole: bool = False
    """Nobody waits for single tokens: a chunk may have all that have come."""
    n: int = 1
    lane: Lane | None = None
    """None: the tenant's default."""
    priority: int = 0
    """Lower is sooner, inside the lane."""
    deadline: float | None = None
    """Seconds this caller will wait for the whole answer, if less than what the gateway allows."""
    patient: bool = False
    """The deadline is all that bounds it, even if that is more than the gateway allows others."""
    ttft: float | None = None
    """Seconds to the first token it asks for; None: the lane's goal."""
    itl: float | None = None
    """Seconds between tokens it asks for; None: the lane's goal."""
    ingress: Ingress = UNKNOWN

    @property
    def asked_tokens(self) -> int | None:
        """The most output that is asked for, by the caller or by the protocol; None means the rest of the context."""
        return self.default_max_tokens if self.max_tokens is None else self.max_tokens

    @property
    def offering(self) -> Chat | None:
        """The chat that offers tools; None: none are offered."""
        return next((prompt for prompt in self.inputs if isinstance(prompt, Chat) and prompt.tools), None)


class Usage(Struct, frozen=True):
    """In tokens. A prompt counts once, however many answers it gets."""

    prompt: int
    completion: int
    cached: int
    """Of the prompt, found in the prefix cache."""
    device_us: int = 0
    """Microseconds of the device's time that the answers have taken."""


class Admitted(Struct, frozen=True):
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


class GenerationChunk(NamedTuple):
    """News of one answer: what one engine event brought."""

    answer: int
    """Its number: prompt number * n + number among the prompt's answers."""
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


class Generation(Struct):
    """An admitted request: `async for chunk in generation`, once."""

    admitted: Admitted
    opening: GenerationChunk | None
    """The first chunk, until it is taken."""
    rest: AsyncIterator[GenerationChunk]

    def __aiter__(self) -> AsyncIterator[GenerationChunk]:
        return self

    async def __anext__(self) -> GenerationChunk:
        if self.opening is None:
            return await anext(self.rest)
        opening, self.opening = self.opening, None
        return opening


class Answer:
    """Turns the engine's events for one answer into chunks: detokenises, matches stop strings, hides the stop token."""

    def __init__(self, index: int, detokenizer: Detokenizer, request: GenerateRequest) -> None:
        self._index = index
        self._detokenizer = detokenizer
        self._keep_stop = request.keep_stop
        self._matcher = StopMatcher(request.stop, keep=request.keep_stop) if request.stop else None
        self._min_tokens = request.sampling.min_tokens
        self._num_tokens = 0

    def absorb(self, event: TokenEvent, more: bool = False) -> GenerationChunk:
        """The chunk's finish_reason is set when a stop string or the event ends the answer.

        `more`: events that come after this one are here already.
        """
        # An engine's STOP means that the last token is an EOS or a stop token: it counts, but usually has no text.
        silent = event.finish_reason is FinishReason.STOP and not self._keep_stop
        visible = event.tokens[:-1] if silent else event.tokens
        text, num_used, stopped = self._push(visible)
        if stopped:
            return self._chunk(event, text, num_used, "stop")
        if event.finish_reason is None:
            return GenerationChunk(self._index, text, event.tokens, event.logprobs, more=more)
        tail, stopped = self._match(self._detokenizer.flush())
        if self._matcher is not None and not stopped:
            tail += self._matcher.flush()
        finish: Finish = "stop" if stopped or event.finish_reason is FinishReason.STOP else "length"
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
