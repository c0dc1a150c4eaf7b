"""Schema of the body of /v1/responses, and the fields that are known but not supported there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from gateway.api_schema.chat_messages import Choice
from gateway.api_schema.chats import Alternatives, ChatRequest, Count, Effort, Fraction, Shaped, Tier
from gateway.openai.refused_fields import Refused, fields_of

LOGPROBS = "message.output_text.logprobs"

Includable = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]
"""Values of `include`. Only LOGPROBS has an effect: the others concern items that no response has."""
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]

Word = Annotated[str, Meta(max_length=256)]
"""A field that takes one of a few words or a name. Each event with the whole response repeats it."""
MAX_DESCRIPTION = 16 * 2**10
"""Maximum characters of the description of a format, which responses repeat, too, and which no prompt has."""


class InputPart(Struct):
    """A part of an item's content: `input_text`, or `output_text`, `refusal` and `reasoning_text` of an earlier
    answer."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(Struct):
    """An item of the input: a message, a tool call or reasoning of an earlier answer, or the result of a call; or a
    reference to an item of a stored response."""

    type: str | None = None
    """`message`, `reasoning`, `function_call`, `function_call_output` or `item_reference`. None means a message or, if
    there is nothing but an id, a reference."""
    id: str | None = None
    """Id of the item that a reference stands for. Other items have ids without effect."""
    role: str | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    """Id that the result of a tool call shares with the call."""
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None

    @property
    def is_reference(self) -> bool:
        """Return whether the item only names another one."""
        return self.type == "item_reference" or (self.type is None and self.role is None and self.id is not None)


class ResponseTool(Struct):
    """A function that the model may call. Calls follow the schema if `strict` is true. A tool of another type, which
    the caller expects the server to run, is skipped: the model does not learn of it."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def is_function(self) -> bool:
        return self.type == "function"


class NamedTool(Struct):
    """Form of `tool_choice` that names the one tool that the model must call."""

    type: str
    name: str | None = None


class TextFormat(Struct):
    """Format of the answer: `type` is text, json_object or json_schema."""

    type: str
    name: Word | None = None
    description: Annotated[str, Meta(max_length=MAX_DESCRIPTION)] | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(Struct):
    format: TextFormat | None = None
    verbosity: Word | None = None
    """Without effect."""


class ReasoningConfig(Struct):
    """How much the model reasons. Summaries are not made."""

    effort: Effort | None = None
    summary: Word | None = None
    generate_summary: Word | None = None


class ResponseStreamOptions(Struct):
    include_obfuscation: bool | None = None
    """Without effect: deltas are not padded."""


class ResponsesRequest(Shaped, kw_only=True):
    """Body of /v1/responses."""

    model: str
    input: str | list[InputItem]
    instructions: str | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Choice | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    thinking_token_budget: Count | None = None
    """Maximum tokens of the reasoning, which OpenAI's API has no field for."""
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Fraction | None = None
    top_logprobs: Alternatives | None = None
    include: list[Includable] | None = None
    max_output_tokens: Count | None = None
    metadata: Metadata | None = None
    service_tier: Tier | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    """True asks for a response that can be retrieved later. None means that the operator's setting decides."""
    background: bool | None = None
    previous_response_id: Annotated[str, Meta(max_length=256)] | None = None
    """Id of a stored response, whose conversation this request continues."""


NO_EFFECT = frozenset(
    (
        "client_metadata",
        "max_tool_calls",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "user",
    )
)
"""Fields that are accepted without effect, also where unknown fields are refused."""

ELSEWHERE = "is not a field of /v1/responses; use /v1/chat/completions"

REFUSED: Mapping[str, Refused] = {
    **fields_of(ChatRequest, ELSEWHERE),
    "context_management": Refused(why="is not supported; shorten the input"),
    "conversation": Refused(why="is not supported; use previous_response_id, or send the earlier items in input"),
    "enable_response_messages": Refused(),
    "logprobs": Refused(why=f"is not a field of /v1/responses; use include: [{LOGPROBS!r}]"),
    "max_completion_tokens": Refused((None,), "is not a field of /v1/responses; use max_output_tokens"),
    "max_new_tokens": Refused((None,), "is not a field of /v1/responses; use max_output_tokens"),
    "max_tokens": Refused((None,), "is not a field of /v1/responses; use max_output_tokens"),
    "messages": Refused(why="is not a field of /v1/responses; use input"),
    "moderation": Refused(),
    "previous_input_messages": Refused(why="is not supported; send the earlier items in input"),
    "previous_response": Refused(why="is not supported; send the earlier items in input"),
    "prompt": Refused(why="is not supported, as prompts are not stored; use instructions and input"),
    "reasoning_effort": Refused((None,), "is not a field of /v1/responses; use reasoning.effort"),
    "response_format": Refused(why="is not a field of /v1/responses; use text.format"),
    "system": Refused((None, ""), "is not a field of /v1/responses; use instructions"),
    "truncation": Refused((None, "disabled"), "must be 'disabled', as no items are dropped; shorten the input"),
}
"""Fields that this route refuses, besides those that all do (`openai/refused_fields.py`). The fields of chats that
ResponsesRequest lacks are among them."""
