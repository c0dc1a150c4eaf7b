"""Schemas of the request bodies of Anthropic's Messages API.

Source: https://docs.anthropic.com/en/api/messages and the types of Anthropic's Python client, 2.14.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from gateway.api_schema.chats import Count, Extended, Fraction
from gateway.core.lanes import LANE_OF_TIER
from gateway.core.routing import ModelQuery

ROLES = ("user", "assistant", "system")
CHOICES = ("auto", "any", "tool", "none")
THINKING = ("enabled", "adaptive", "disabled")
STANDARD_ONLY = "standard_only"
"""Anthropic's `service_tier` that declines priority; here it means the tenant's default lane."""

Role = Annotated[str, Meta(extra_json_schema={"enum": list(ROLES)})]
ThinkingType = Annotated[str, Meta(extra_json_schema={"enum": list(THINKING)})]
ChoiceType = Annotated[str, Meta(extra_json_schema={"enum": list(CHOICES)})]
Tier = Annotated[str, Meta(extra_json_schema={"enum": sorted([*filter(None, LANE_OF_TIER), STANDARD_ONLY])})]


class TextBlock(Struct, tag_field="type", tag="text"):
    text: str


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    """A tool call that an earlier answer made and that the caller sends back."""

    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Struct, tag_field="type", tag="tool_result"):
    """The result of a tool call. `is_error` is accepted but not shown to the model, because chat templates have no
    place for it; the content says what failed."""

    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    """Reasoning of an earlier answer that the caller sends back. Its signature has no effect."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Struct, tag_field="type", tag="redacted_thinking"):
    """Reasoning of an earlier answer of another service, which has encrypted it. The model does not see it."""

    data: str | None = None


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class InputMessage(Struct):
    """A turn of the conversation. The role `system` is for instructions within it."""

    role: Role
    content: str | list[Block]


class InputTool(Struct, kw_only=True):
    """A tool of the caller. With `strict`, all calls of it follow its schema."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: str | None = None
    """None or `custom`."""
    strict: bool | None = None


class InputChoice(Struct):
    """The rule for tool calls: the model may (auto), must (any) or must not (none) call tools, or must call the one
    that is named (tool)."""

    type: ChoiceType
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Struct):
    """Format of the answer's text; the only `type` is json_schema."""

    type: str
    schema: dict[str, Any]


class ThinkingConfig(Struct):
    """Asks the model to reason before it answers, or not to. `budget_tokens` are the most tokens of the reasoning."""

    type: ThinkingType
    budget_tokens: Count | None = None


class OutputConfig(Struct):
    """Settings of the answer. `effort` is a variable of the chat template, `reasoning_effort`."""

    format: OutputFormat | None = None
    effort: str | None = None


class Prompted(Extended, kw_only=True):
    """Fields of the bodies of both routes: those that determine the model and the prompt, and the extensions."""

    model: str
    messages: Annotated[list[InputMessage], Meta(extra_json_schema={"minItems": 1})]
    system: str | list[TextBlock] | None = None
    tools: list[InputTool] | None = None
    tool_choice: InputChoice | None = None
    output_config: OutputConfig | None = None
    thinking: ThinkingConfig | None = None

    @property
    def query(self) -> ModelQuery:
        return ModelQuery(self.model, self.adapter_id, self.lora_path)


class CountTokensRequest(Prompted, kw_only=True):
    """Body of /v1/messages/count_tokens."""


class MessagesRequest(Prompted, kw_only=True):
    """Body of /v1/messages."""

    max_tokens: Count
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    service_tier: Tier | None = None
