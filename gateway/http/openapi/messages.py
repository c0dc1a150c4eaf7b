"""Operations of Anthropic's Messages API, and its response bodies as described in /openapi.json. They are rendered in
gateway/anthropic/render.py."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from gateway.anthropic.errors import MESSAGES
from gateway.anthropic.schema import CountTokensRequest, MessagesRequest
from gateway.api_schema.operation import Operation
from gateway.core.errors import Fault
from gateway.http.openapi.answers import MessageErrorDetail

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageUsage(Struct):
    """Usage of a request in tokens. The prompt has `input_tokens` and those that were read from the cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageBlock(Struct):
    """A text, reasoning with an empty signature, or a tool call with its id, name and input."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: dict[str, Any] | UnsetType = UNSET


class Message(Struct):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageBlock]
    stop_reason: StopReason | None
    """Null in message_start only."""
    stop_sequence: str | None
    usage: MessageUsage


class MessageDelta(Struct):
    """New text, reasoning or arguments of a block or, in message_delta, why the answer ended."""

    type: Literal["text_delta", "thinking_delta", "input_json_delta"] | UnsetType = UNSET
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    stop_reason: StopReason | UnsetType = UNSET
    stop_sequence: str | UnsetType | None = UNSET


class MessageEvent(Struct):
    """Data of one event of a stream. The event has the name of its type; the last is message_stop or error."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "ping",
        "error",
    ]
    message: Message | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: MessageBlock | UnsetType = UNSET
    delta: MessageDelta | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET
    error: MessageErrorDetail | UnsetType = UNSET
    request_id: str | UnsetType = UNSET


class TokenCount(Struct):
    input_tokens: int


def message_operations(generation: frozenset[Fault]) -> tuple[Operation, ...]:
    """Return the operations below /v1/messages. `generation` holds the errors of every request for a generation."""
    count = frozenset({Fault.MODEL_NOT_FOUND, Fault.UNSUPPORTED_PARAMETER, Fault.RATE_LIMIT_EXCEEDED})
    return (
        Operation("POST", MESSAGES, "Create a message.", "tenant", Message, MessagesRequest, generation, MessageEvent),
        Operation(
            "POST",
            f"{MESSAGES}/count_tokens",
            "Count the tokens of a message's prompt.",
            "tenant",
            TokenCount,
            CountTokensRequest,
            count,
        ),
    )
