"""What a caller may ask of an answer, with the names, bounds and defaults of the HTTP API."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, TypedDict

import msgspec
from msgspec import Struct

from gateway.api_schema.chats import ChatRequest, CompletionRequest
from gateway.api_schema.vectors import EmbeddingsRequest
from gateway.core.errors import invalid_request
from gateway.core.lanes import TIER_OF_LANE, lane_name
from gateway.embeddings.parse import embeddings_request
from gateway.openai.convert import chat_request, completion_request
from gateway.openai.parse import to_struct
from gateway.requests.types import GenerateRequest

LaneName = Literal["interactive", "batch"]
Prompt = str | Sequence[int]
"""A text to continue, or token ids to continue."""
ChatMessages = Sequence[dict[str, Any]]
"""A conversation: messages with `role` and `content`, as in OpenAI's API."""


class SamplingParams(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """How answers are generated. The fields are those of the HTTP API, which documents them (docs/openai.md); None
    means its default. They are checked when a request is made, with errors that name the field."""

    max_tokens: int | None = None
    """Maximum output tokens. None means 16, as in OpenAI's API, or in a chat the rest of the context."""
    min_tokens: int | None = None
    n: int | None = None
    """Number of answers for each prompt."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logprobs: int | None = None
    """Number of alternatives of each token, 0 to 20, whose log probabilities are returned beside the token's own. None
    means that none are returned."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt, in `Result.prompt_logprobs`. A stream cannot have them."""
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    priority: int | None = None
    """Priority within the lane; a lower value is served sooner."""
    slo: dict[str, float] | None = None
    """Latency goals of the request: `ttft_ms` and `itl_ms`."""
    timeout: float | None = None
    """Seconds within which the whole answer must have come."""
    cache_salt: str | None = None
    speculation: Literal["off", "auto"] | None = None


class ChatOptions(TypedDict, total=False):
    """Fields of the HTTP API that only chats have."""

    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    reasoning_effort: str
    thinking_token_budget: int
    prediction: dict[str, Any]
    chat_template_kwargs: dict[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool


DEFAULTS = SamplingParams()
TIERS: Mapping[str, str] = MappingProxyType({lane_name(lane): tier for lane, tier in TIER_OF_LANE.items()})
"""The HTTP API's `service_tier` for each lane's name."""


def text_request(
    model: str, prompt: Prompt, params: SamplingParams, lane: LaneName, *, streams: bool
) -> GenerateRequest:
    """Return the request to continue one prompt with the adapter or base model `model`. `streams` means that the caller
    takes tokens as they come. Raises ApiError, which names the field that cannot be used."""
    body = _body(model, params, lane, streams) | {"prompt": prompt if isinstance(prompt, str) else list(prompt)}
    if prompt and not isinstance(prompt, str) and not all(isinstance(token_id, int) for token_id in prompt):
        raise invalid_request("a prompt must be a text or token ids", "prompt")
    return completion_request(to_struct(body, CompletionRequest), _new_id())


def chat_request_of(
    model: str, messages: ChatMessages, params: SamplingParams, options: ChatOptions, lane: LaneName, *, streams: bool
) -> GenerateRequest:
    """Return the request to answer a conversation, like `text_request`."""
    body = {**_body(model, params, lane, streams), **options, "messages": list(messages)}
    if params.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": params.logprobs}
    return chat_request(to_struct(body, ChatRequest), _new_id())


def vectors_request(model: str, texts: Sequence[Prompt], fields: dict[str, Any], lane: LaneName) -> GenerateRequest:
    """Return the request for the vectors of some texts. `fields` are further fields of /v1/embeddings. Raises ApiError,
    which names the field that cannot be used."""
    given = [text if isinstance(text, str) else list(text) for text in texts]
    body = {"model": model, "input": given, "service_tier": _tier(lane), **fields}
    return embeddings_request(to_struct(body, EmbeddingsRequest), _new_id())


def _body(model: str, params: SamplingParams, lane: LaneName, streams: bool) -> dict[str, Any]:
    fields = msgspec.to_builtins(params, str_keys=True)
    return {"model": model, "service_tier": _tier(lane), "stream": streams, **fields}


def _tier(lane: LaneName) -> str:
    if lane not in TIERS:
        raise invalid_request(f"lane must be one of {', '.join(TIERS)}, not {lane!r}", "lane")
    return TIERS[lane]


def _new_id() -> str:
    return f"local-{uuid.uuid4().hex}"
