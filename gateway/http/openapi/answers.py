"""Response bodies as described in /openapi.json. Those of generations are rendered in gateway/openai/render.py."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from gateway.requests.types import MemberChoice

Finish = Literal["stop", "length", "tool_calls"]


class ErrorDetail(Struct):
    message: str
    type: str
    param: str | None
    """The request field that caused the error."""
    code: str | None


class Error(Struct):
    """Body of every error. After the first byte of a stream, it is the data of the last event before [DONE]."""

    error: ErrorDetail


class MessageErrorDetail(Struct):
    type: str
    message: str


class MessageError(Struct):
    """Body of every error of Anthropic's API, and data of the event `error` that ends a stream early."""

    type: Literal["error"]
    error: MessageErrorDetail
    request_id: str


class CachedTokens(Struct):
    cached_tokens: int


class CompletionDetails(Struct):
    reasoning_tokens: int | UnsetType = UNSET
    accepted_prediction_tokens: int | UnsetType = UNSET
    """Output tokens that the engine took from the request's `prediction`."""
    rejected_prediction_tokens: int | UnsetType = UNSET
    """Tokens of the `prediction` that the engine computed in vain. They are no output tokens and are not charged."""


class Usage(Struct):
    """Usage of a request in tokens. A prompt counts once, however many answers it gets."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionDetails | UnsetType = UNSET
    """Set if any of the tokens are reasoning, or the engine used the request's `prediction`."""


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]
    refusal: None


class CalledTool(Struct):
    name: str
    arguments: str


class ToolCall(Struct):
    id: str
    type: Literal["function"]
    function: CalledTool


class AnswerMessage(Struct):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    """What a reasoning model wrote before its answer."""
    reasoning: str | UnsetType = UNSET
    """The same, under the name that vLLM uses."""
    tool_calls: list[ToolCall] | UnsetType = UNSET


StopReason = str | int | None
"""The stop string, or the id in `stop_token_ids`, that ended the answer; null if something else did."""


class ChatChoice(Struct):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish
    stop_reason: StopReason
    token_ids: list[int] | UnsetType = UNSET


class Head(Struct, kw_only=True):
    """Fields that a complete response and every chunk of a stream have in common. `created` is in Unix seconds."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    service_tier: Literal["default", "priority", "flex"]
    x_loralane: MemberChoice | UnsetType = UNSET
    """Set if `model` is a virtual model. `discarded` lists what other members computed, which is charged, too."""


class PromptToken(Struct):
    """Log probability of a token, and its rank among all tokens, from 1."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptToken] | None]
"""For each token of the prompt, the token itself and the likeliest ones, by token id; null for the first token."""


class ChatCompletion(Head, kw_only=True):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ToolCallNews(Struct):
    index: int
    function: dict[str, str]
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class Delta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallNews] | UnsetType = UNSET


class ChunkChoice(Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None
    stop_reason: StopReason | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(Head, kw_only=True):
    """Data of one event of a stream. The last event of a stream is [DONE]."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionLogprobs(Struct):
    """Log probabilities of the text's tokens; null for the first token of an echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: StopReason | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Head, kw_only=True):
    """A completion, or the data of one event of a stream, where a finish_reason of null means that more follows."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class Invoked(Struct):
    """The answer, or the data of one event, of the endpoint that the body is for."""
