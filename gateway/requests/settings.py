"""The settings that bound the requests of a gateway."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.core.messages.requests import Lane
from gateway.text.reasoning.parser import ReasoningParserName
from gateway.text.tools.dialects import ToolParserName


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """Settings of the gateway service. Times are in seconds; None means no limit."""

    max_choices: int = 128
    """Maximum number of answers of one request: prompts x n."""
    max_pooled: int = 2048
    """Maximum number of prompts of a request for vectors, as in OpenAI's API. `max_choices` of them at most are in the
    engine at the same time."""
    max_pooled_tokens: int = 300_000
    """Maximum number of tokens of all prompts of a request for vectors, as in OpenAI's API, unless the context of the
    model is longer."""
    max_prompt_logprobs: int = 200_000
    """Maximum number of log probabilities of prompts in one response: for each token its own and its alternatives'.
    They allow 33,333 tokens with 5 alternatives, which is as many as OpenAI's completions have."""
    max_stop_characters: int = 16_384
    """Maximum total length of a request's stop strings, in characters."""
    max_listed_ids: int = 1024
    """Maximum number of token ids in stop_token_ids and in logit_bias each. Every answer sends them to the engine."""
    request_timeout: float | None = 600.0
    first_token_timeout: float | None = 120.0
    """Maximum time to the first token in the interactive lane. In the batch lane, only the limit of the
    whole request applies."""
    engine_wait: float = 60.0
    """Maximum time that a request waits for a new engine process, each time that one ends."""
    lane_capacity: Mapping[Lane, int] = field(default_factory=dict)
    """Maximum number of answers in progress, by lane. A lane that is missing has no limit."""
    tool_parser: ToolParserName = "auto"
    """Dialect in which the model writes tool calls; `auto` detects it from the chat template."""
    reasoning_parser: ReasoningParserName = "auto"
    """Marks around the model's reasoning; `auto` detects them from the chat template."""
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    """Sampling parameters where a request sets none, and the bound `max_tokens` (see `read_sampling_defaults`)."""
