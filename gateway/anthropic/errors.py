"""Errors in the shape of Anthropic's API, with its types and statuses."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from gateway.core.errors import ApiError, Fault

MESSAGES = "/v1/messages"

OVERLOADED = 529
"""Status of Anthropic's API for a lack of shared capacity, which is 503 elsewhere in the gateway."""
CAPACITY = frozenset((Fault.LANE_QUEUE_FULL, Fault.QUEUE_TIMEOUT, Fault.PREEMPTED))

TYPES: Mapping[int, str] = MappingProxyType(
    {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        500: "api_error",
        503: "api_error",
        504: "timeout_error",
        507: "api_error",
        OVERLOADED: "overloaded_error",
    }
)
"""Error types by HTTP status, after https://docs.anthropic.com/en/api/errors. Every other status has the type
`invalid_request_error`."""
FIELDS = ((".function.parameters", ".input_schema"), (".function.name", ".name"))
"""Replacements in error messages and field paths: a part of the path of an OpenAI field, and Anthropic's name for
it."""


def is_messages_path(path: str) -> bool:
    """Return whether a path belongs to Anthropic's API, in whose shape all errors on it are."""
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def error_status(fault: Fault) -> int:
    """Return the HTTP status of an error in Anthropic's API."""
    return OVERLOADED if fault in CAPACITY else fault.row.http_status


def error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    """Return the JSON body of an error, also for the event `error` of a stream."""
    message = _too_long(error) if error.fault is Fault.CONTEXT_LENGTH_EXCEEDED else _message(error)
    kind = TYPES.get(error_status(error.fault), "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def _too_long(error: ApiError) -> str:
    """Return the message of a prompt that does not fit, in Anthropic's words: by them Claude Code knows that it has to
    shorten the conversation."""
    numbers = error.metadata
    told = f"{numbers['tokens']} tokens > {numbers['max_tokens']} maximum" if "tokens" in numbers else error.message
    return f"prompt is too long: {told}"


def _message(error: ApiError) -> str:
    """Return the message of an error, after the parameter that caused it, for which the body has no field."""
    message, param = _named(error.message), _named(error.param or "")
    if param == "stop":
        message, param = message.removeprefix("stop: "), "stop_sequences"
    return f"{param}: {message}" if param and param not in message else message


def _named(text: str) -> str:
    for theirs, ours in FIELDS:
        text = text.replace(theirs, ours)
    return text
