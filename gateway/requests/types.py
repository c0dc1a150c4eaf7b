"""Requests, chunks and results of a generation, independent of the protocol. HTTP and gRPC convert to and from these
types."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from engine.core.messages.requests import Lane, Pooling, SamplingParams, TokenLogprobs
from gateway.core.lanes import lane_name
from gateway.core.routing import ModelQuery
from gateway.core.trace_context import UNKNOWN, Ingress
from gateway.core.usage import DeferredUsage
from gateway.requests.deadlines import TimeLimits
from gateway.requests.options import EncodingOptions, FieldNames, OutputOptions, Urgency
from gateway.requests.prompt_scores import PromptScores
from gateway.text.chat_template import DEFAULT_OPTIONS, Message, TemplateOptions, ToolSchema
from gateway.text.tokenizer import Tokenizer
from gateway.text.tools.calls import ToolCallPart
from gateway.text.tools.dialect import Dialect
from gateway.text.tools.rule import FREE, ToolRule


class Chat(Struct, frozen=True, weakref=True):
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


DEFAULTED = frozenset(("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"))
"""Sampling parameters for which a model may have defaults, and the seed, for which the gateway draws one."""


class GenerateRequest(Struct, frozen=True):
    """A request of a caller as `Gateway.generate` takes it, with one or several prompts. Each is answered `n` times."""

    model: ModelQuery
    prompts: tuple[PromptInput, ...]
    request_id: str
    """Id that the caller or the protocol chose; it need not be unique."""
    n: int = 1
    sampling: SamplingParams = SamplingParams()
    """Sampling parameters. The gateway sets max_tokens and those in `defaulted`. Answer i of a prompt uses seed + i."""
    defaulted: frozenset[str] = DEFAULTED
    """Names of the fields of `sampling`, among `DEFAULTED`, that the caller did not set: they take the defaults of the
    model that answers, if it has any, and the seed a random number."""
    output: OutputOptions = OutputOptions()
    urgency: Urgency = Urgency()
    time_limits: TimeLimits = TimeLimits()
    encoding: EncodingOptions = EncodingOptions()
    prediction: str = ""
    """Text that the answers will repeat for the most part, whose tokens the engine proposes."""
    pooling: Pooling | None = None
    """Asks for a vector of each prompt in place of answers; `output.max_tokens` must be 0. None means that answers are
    generated."""
    fields: FieldNames = FieldNames()
    deferred: DeferredUsage | None = None
    """Where the usage of the request's runs is written if it is a line of a batch, in place of being counted. None for
    all other requests."""
    ingress: Ingress = UNKNOWN

    @property
    def is_batch_line(self) -> bool:
        """True if the request is a line of a batch, which the gateway itself sends again after most refusals."""
        return self.deferred is not None

    def given(self, name: str) -> float | None:
        """Return the sampling parameter `name`, one of `DEFAULTED`. None means that the caller did not set it."""
        return None if name in self.defaulted else getattr(self.sampling, name)

    def prompt_field(self, index: int) -> str:
        """Return the name of the request field that a prompt came from."""
        if self.fields.prompts:
            return self.fields.prompts[index]
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
    accepted_prediction: int = 0
    """Tokens of `completion` that steps took from the request's `prediction`."""
    rejected_prediction: int = 0
    """Tokens of the request's `prediction` that steps computed in vain, which are no output tokens."""


class Speech(Struct, frozen=True):
    """Says how to read a model's answers: with which tokenizer, and in which dialect it writes tool calls."""

    tokenizer: Tokenizer
    dialect: Dialect | None
    """Dialect in which the model writes tool calls. None means that the gateway parses none."""
    calls_apart: bool = False
    """True means that chunks have tool calls in `calls`, so that their text is not parsed for any."""


class DiscardedRun(Struct, frozen=True):
    """A computation for a virtual model whose answer the caller does not get. Its tokens are charged."""

    model: str
    """The member, or the virtual model itself if its policy needed the computation to decide."""
    prompt_tokens: int
    completion_tokens: int


class MemberChoice(Struct, frozen=True):
    """Which member of a virtual model answers, as callers see it in `x_loralane`."""

    model: str
    reason: str
    """Why this member answers, in one word of the policy."""
    discarded: tuple[DiscardedRun, ...] | UnsetType = UNSET


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
    speech: Speech
    """How to read the answers of the model that answers."""
    temperature: float | None = None
    """Temperature with which the answers are sampled. None means that it is not known: the caller set none, and the
    model that answers is elsewhere or not chosen yet."""
    top_p: float | None = None
    """As `temperature`, for the sampling parameter of this name."""
    member: MemberChoice | None = None
    """None means that the caller named no virtual model."""

    def headers(self) -> dict[str, str]:
        headers = {**self.rate_headers, "x-loralane-lane": lane_name(self.lane)}
        if self.member is not None:
            headers |= {"x-loralane-model": self.member.model, "x-loralane-reason": self.member.reason}
        return headers


class GenerationChunk(Struct, frozen=True):
    """A part of one answer: the text and tokens of one engine event, or of several that were merged or joined."""

    answer: int
    """Number of the answer in its request: prompt number * n + number among the prompt's answers."""
    text: str = ""
    """New text of the answer. It may be empty while a character, a mark or a possible stop string is incomplete."""
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
    calls: tuple[ToolCallPart, ...] = ()
    """Parts of tool calls, if the answering model tells them apart from its text (`Speech.calls_apart`)."""
    prompt_scores: PromptScores = PromptScores()
    """The next tokens of the prompt, with their log probabilities; empty if the caller did not ask for them."""

    @property
    def has_output(self) -> bool:
        """Return whether the chunk has tokens, text, calls, log probabilities of the prompt, or a vector."""
        told = self.token_ids or self.text or self.reasoning or self.calls
        return bool(told or self.prompt_scores.rows or self.vector)


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
