"""Bodies of chats and completions.

Misspellings of known fields are refused (`openai/unknown.py`). Other unknown fields have no effect, unless the tenant
is configured to have them refused. An unsupported field that would change the answer is refused, unless its value has
no effect (`openai/refused_fields.py`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from gateway.api_schema.chat_messages import ChatMessage, Choice, ContentPart, Tool, ToolChoice
from gateway.core.lanes import LANE_OF_TIER

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
"""Values of `reasoning_effort`, as in OpenAI's API."""
Side = Literal["left", "right"]
"""Side on which a prompt loses tokens."""
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=10)]
"""Divides scores, which a penalty near 0 would make infinite: then no token could be chosen. No server documents values
below 0.1."""
Bias = Annotated[float, Meta(ge=-100, le=100)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""A token id. Integers that become keys or members of sets are bounded: 25,000 multiples of 2^61 - 1, which all have
the hash 0, took 5 s."""
Biases = Annotated[dict[TokenId, Bias], Meta(extra_json_schema={"propertyNames": {"pattern": "^[0-9]+$"}})]
Tier = Annotated[str, Meta(extra_json_schema={"enum": sorted(filter(None, LANE_OF_TIER))})]
Effort = Annotated[str, Meta(extra_json_schema={"enum": list(EFFORTS)})]
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Alternatives = Annotated[int, Meta(ge=0, le=20)]
Milliseconds = Annotated[float, Meta(gt=0, le=86_400_000)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Salt = Annotated[str, Meta(min_length=1, max_length=1024)]
ClassName = Annotated[str, Meta(min_length=1, max_length=64)]
Speculation = Literal["off", "auto"]
Kept = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
"""Most tokens of a prompt that are kept, at least 1; -1 means as many as the context holds beside the answer."""


class StreamOptions(Struct):
    """What a stream tells beside the answers. `continuous_usage_stats` needs `include_usage`, as in vLLM's API: every
    chunk has the usage so far, not only the last one."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Slo(Struct):
    """Latency goals, in milliseconds, that a request sets in place of its lane's. OpenAI's API has no such field."""

    ttft_ms: Milliseconds | None = None
    """Goal for the time to the first token (TTFT)."""
    itl_ms: Milliseconds | None = None
    """Goal for the inter-token latency (ITL)."""

    @property
    def ttft(self) -> float | None:
        """TTFT goal in seconds. None means the lane's goal."""
        return None if self.ttft_ms is None else self.ttft_ms / 1000

    @property
    def itl(self) -> float | None:
        """ITL goal in seconds. None means the lane's goal."""
        return None if self.itl_ms is None else self.itl_ms / 1000


class JsonSchema(Struct, kw_only=True):
    """A named JSON schema. Answers follow it whether or not `strict` is set."""

    schema: dict[str, Any]
    name: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct):
    """Format of the answer, as in OpenAI's API: `type` is text, json_object or json_schema. With either of the last
    two, `schema` is the schema itself, as in llama.cpp's and SGLang's APIs."""

    type: str
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None


class StructuredOutputs(Struct, kw_only=True):
    """Structured outputs, as in vLLM's API: one of json, regex, choice, grammar and json_object, and no other field."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class Extended(Struct, kw_only=True):
    """Fields that the bodies of all generations have, and that neither OpenAI's nor Anthropic's API has."""

    adapter_id: str | None = None
    lora_path: str | None = None
    priority: Int32 | None = None
    request_class: ClassName | None = None
    """Name of one of the tenant's classes of requests, which divide its share of a lane."""
    slo: Slo | None = None
    timeout: Seconds | None = None
    """Seconds for the whole answer, as in LiteLLM's proxy; the header `x-request-timeout` sets it, too."""
    stall_timeout: Seconds | None = None
    """Seconds for each token after the first; the header `x-stall-timeout` sets it, too."""
    cache_salt: Salt | None = None
    """Requests share cached prefixes only with those of the same salt, as in vLLM's API."""
    speculation: Speculation | None = None
    """`off` means that the engine computes one token of the answer in a step. `auto`, the default, lets it verify
    several proposed tokens where that is faster, if `engine.speculation` does."""


class Shaped(Extended, kw_only=True):
    """Fields that the bodies of chats, completions and responses have in common: how tokens are chosen, when an answer
    ends, and which grammar it follows."""

    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Fraction | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    repeat_penalty: RepetitionPenalty | None = None
    """As `repetition_penalty`, in llama.cpp's and Ollama's APIs."""
    logit_bias: Biases | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    allowed_token_ids: list[TokenId] | None = None
    """Answers consist of these tokens alone, as in vLLM's API; EOS ends them only if it is one of them."""
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None
    """As `structured_outputs.json`, in SGLang's and llama.cpp's APIs; `regex`, `ebnf` and `grammar` likewise."""
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    format: dict[str, Any] | Literal["json", ""] | None = None
    """A JSON schema, or `json` for any object, as in Ollama's API."""

    def __post_init__(self) -> None:
        if self.repetition_penalty is None:
            self.repetition_penalty = self.repeat_penalty

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class Sampled(Shaped, kw_only=True):
    """Fields that the bodies of chats and of completions have in common."""

    model: str
    max_tokens: Count | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    best_of: int | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Fraction | None = None
    """0 means greedy: only the likeliest token is left to sample from."""
    add_special_tokens: bool | None = None
    """True means that the prompt gets special tokens such as BOS, as in vLLM's API. By default texts do, and chats,
    whose template writes them, do not."""
    truncate_prompt_tokens: Kept | None = None
    """Longer prompts lose their beginning, as in vLLM's API, or their end if `truncation_side` is right."""
    truncation_side: Side | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Tokens of log probabilities are named `token_id:ID`, as in vLLM's API."""
    prompt_logprobs: Alternatives | None = None
    """Alternatives with the log probability of each prompt token, as in vLLM's API."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    service_tier: Tier | None = None
    response_format: ResponseFormat | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.include_usage and self.stream_options and self.stream_options.continuous_usage_stats)


class Prediction(Struct):
    """A text that the answer will repeat for the most part, such as a file to be edited. `type` is content. With
    speculation, the engine proposes its tokens; it is cut to the length of the context."""

    type: Literal["content"]
    content: str | list[ContentPart]


class ReasoningOptions(Struct):
    """How much a chat's model reasons, as in OpenRouter's and Ollama's APIs."""

    effort: Effort | None = None
    """As `reasoning_effort`."""
    enabled: bool | None = None
    """Switches reasoning on or off, where no effort is given."""
    max_tokens: Count | None = None
    """As `thinking_token_budget`."""


class ChatRequest(Sampled, kw_only=True):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(extra_json_schema={"minItems": 1})]
    max_completion_tokens: Count | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    reasoning: ReasoningOptions | None = None
    thinking_token_budget: Count | None = None
    """Maximum tokens of the answer's reasoning, as in vLLM's API."""
    prediction: Prediction | None = None
    tools: list[Tool] | None = None
    tool_choice: Choice | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None


class CompletionRequest(Sampled, kw_only=True):
    """Body of /v1/completions."""

    prompt: str | list[str | int | list[int]]
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    """Maximum output tokens. 0 generates nothing and is accepted only with `echo` or `prompt_logprobs`."""
    logprobs: Alternatives | None = None
    echo: bool | None = None
