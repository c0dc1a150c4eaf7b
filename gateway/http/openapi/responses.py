"""Bodies and events of /v1/responses as described in /openapi.json. They are rendered in gateway/responses/."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from gateway.api_schema.operation import Operation
from gateway.core.errors import Fault
from gateway.http.lists import MAX_NUMBER
from gateway.http.openapi.answers import CachedTokens, TokenLogprob
from gateway.http.routes.responses import CANCEL, INPUT_ITEMS, RESPONSE
from gateway.protocols.generation import RESPONSES
from gateway.responses.schema import ResponsesRequest
from gateway.responses.service import MAX_PAGE

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class ContentPart(Struct):
    """Text of a message, with annotations and log probabilities, or of reasoning, without."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[Any] | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET


class OutputItem(Struct):
    """A message, with `role` and `content`, reasoning, with `content` and an empty `summary`, or a tool call, with the
    other fields."""

    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: ItemStatus
    role: Literal["assistant"] | UnsetType = UNSET
    content: list[ContentPart] | UnsetType = UNSET
    summary: list[Any] | UnsetType = UNSET
    call_id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class InputTokens(CachedTokens):
    cache_write_tokens: int


class OutputTokens(Struct):
    reasoning_tokens: int


class ResponseUsage(Struct):
    """Usage of a request in tokens."""

    input_tokens: int
    input_tokens_details: InputTokens
    output_tokens: int
    output_tokens_details: OutputTokens
    total_tokens: int


class ResponseError(Struct):
    code: str
    message: str


class IncompleteDetails(Struct):
    reason: Literal["max_output_tokens"]


class ResponseObject(Struct, kw_only=True):
    """A response. Times are in Unix seconds. The request's fields are repeated, with their defaults filled in."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: ResponseError | None
    """The error that ended a stream or a background response; null unless the status is `failed`."""
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    service_tier: Literal["default", "priority", "flex"]
    store: bool
    """True means that the response is stored. It is false in the last event if that failed."""
    previous_response_id: str | None
    truncation: Literal["disabled"]
    temperature: float | None
    """Null if it is not known: the request set none, and the model that answers is elsewhere or not chosen yet."""
    top_p: float | None
    top_logprobs: int
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    reasoning: dict[str, Any] | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]


class DeletedResponse(Struct):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(Struct):
    """A page of the items of a request's own input, as they were sent, with ids."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


EventType = Literal[
    "response.created",
    "response.queued",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.reasoning_text.delta",
    "response.reasoning_text.done",
    "response.content_part.done",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
    "response.completed",
    "response.incomplete",
    "response.failed",
    "error",
]


class ResponseEvent(Struct, kw_only=True):
    """Data of one event of a stream. The event is named after its type, which decides which other fields there are; the
    last one is completed, incomplete or failed (also if the response was cancelled). An `error` ends the stream of a
    background response that was deleted."""

    type: EventType
    sequence_number: int
    """Number of the event in its stream, from 0."""
    response: ResponseObject | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: ContentPart | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    code: str | UnsetType | None = UNSET
    message: str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET


STORED = frozenset({Fault.RESPONSE_NOT_FOUND, Fault.REGISTRY_UNAVAILABLE})
READ = STORED | {Fault.INVALID_REQUEST}
STREAMED = READ | {Fault.RATE_LIMIT_EXCEEDED}
INCLUDE = {"include": {"type": "array", "items": {"type": "string"}}}
STREAM: Mapping[str, Mapping[str, Any]] = {
    "stream": {"type": "boolean"},
    "starting_after": {"type": "integer", "minimum": 0, "maximum": MAX_NUMBER},
    **INCLUDE,
}
PAGE: Mapping[str, Mapping[str, Any]] = {
    "after": {"type": "string"},
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE},
    "order": {"type": "string", "enum": ["asc", "desc"]},
    **INCLUDE,
}


def response_operations(generation: frozenset[Fault]) -> tuple[Operation, ...]:
    """Return the operations below /v1/responses. `generation` has the errors that every generation may have."""
    full = {Fault.INSUFFICIENT_STORAGE}
    created = generation | full | {Fault.PREVIOUS_RESPONSE_NOT_FOUND, Fault.REGISTRY_UNAVAILABLE}
    return (
        Operation(
            "POST",
            RESPONSES,
            "Create a response.",
            "tenant",
            ResponseObject,
            ResponsesRequest,
            created,
            ResponseEvent,
        ),
        Operation(
            "GET",
            RESPONSE,
            "Get a stored response, or stream a background response from an event on.",
            "tenant",
            ResponseObject,
            faults=STREAMED,
            events=ResponseEvent,
            query=STREAM,
        ),
        Operation("DELETE", RESPONSE, "Delete a stored response.", "tenant", DeletedResponse, faults=STORED),
        Operation("POST", CANCEL, "Cancel a background response.", "tenant", ResponseObject, faults=READ),
        Operation("GET", INPUT_ITEMS, "List a response's input items.", "tenant", InputItems, faults=READ, query=PAGE),
    )
