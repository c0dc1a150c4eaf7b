"""Parses bodies of /v1/responses, and calls fields in errors by the names that they have there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from gateway.api_schema.chats import Slo, StructuredOutputs
from gateway.core.errors import ApiError, invalid_request
from gateway.core.tenants import UnknownFields
from gateway.openai.parse import decode_json, to_struct
from gateway.openai.refused_fields import refuse_unsupported
from gateway.openai.unknown import check_unknown, suggestion
from gateway.responses.schema import (
    NO_EFFECT,
    REFUSED,
    ReasoningConfig,
    ResponsesRequest,
    ResponseStreamOptions,
    ResponseTool,
    TextConfig,
    TextFormat,
)

FUNCTION = "function"

KNOWN: Mapping[str, frozenset[str]] = {
    "": frozenset((*ResponsesRequest.__struct_fields__, *REFUSED, *NO_EFFECT)),
    "slo": frozenset(Slo.__struct_fields__),
    "structured_outputs": frozenset(StructuredOutputs.__struct_fields__),
    "reasoning": frozenset((*ReasoningConfig.__struct_fields__, "context", "mode")),
    "stream_options": frozenset(ResponseStreamOptions.__struct_fields__),
    "text": frozenset(TextConfig.__struct_fields__),
    "text.format": frozenset(TextFormat.__struct_fields__),
    "tools": frozenset((*ResponseTool.__struct_fields__, "allowed_callers", "async", "defer_loading", "output_schema")),
}
"""Known field names of each object in the body, by the object's path; the body itself has an empty path."""

OWN_NAMES = (
    (re.compile(r"messages"), "input"),
    (re.compile(r"max_tokens"), "max_output_tokens"),
    (re.compile(r"response_format\.json_schema|response_format"), "text.format"),
    (re.compile(r"(tools\[\d+\])\.function"), r"\1"),
    (re.compile(r"reasoning_effort"), "reasoning.effort"),
    (re.compile(r"tool_choice\.function"), "tool_choice.name"),
)
"""Beginnings of the paths of fields in chats, and what /v1/responses calls the same fields."""


def parse(text: bytes, unknown: UnknownFields = "ignore") -> ResponsesRequest:
    """Parse a JSON body. `unknown` decides about unknown fields that are not misspellings of known ones.

    Raises ApiError: INVALID_JSON; INVALID_REQUEST, a field is missing, unknown, of a wrong type or out of range;
    UNSUPPORTED_PARAMETER, a field is set that is not supported. The last two name the field.
    """
    document = decode_json(text, ResponsesRequest)
    if isinstance(document, dict):
        tools = document.get("tools")
        if isinstance(tools, list):
            document["tools"] = [_skipped(tool, f"tools[{index}]") or tool for index, tool in enumerate(tools)]
        check_unknown(document, KNOWN, unknown)
        refuse_unsupported(document, ResponsesRequest, REFUSED)
    return to_struct(document, ResponsesRequest)


def _skipped(tool: Any, place: str) -> dict[str, Any] | None:
    """Return what is kept of a tool that the model cannot call, because the caller expects the server to run it: its
    type and its name. None means that it is no such tool. Raises ApiError: INVALID_REQUEST, its type is misspelled."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str) or kind == FUNCTION:
        return None
    if suggestion(kind, frozenset((FUNCTION,))):
        raise invalid_request(f"{place}.type: there is no {kind[:80]!r}; did you mean {FUNCTION!r}?", f"{place}.type")
    name = tool.get("name")
    return {"type": kind, "name": name if isinstance(name, str) else None}


@contextmanager
def own_names() -> Iterator[None]:
    """Within the block, an ApiError that names a field of a chat gets the name of the same field in /v1/responses,
    because both go through the same checks."""
    try:
        yield
    except ApiError as error:
        _rename(error)
        raise


def _rename(error: ApiError) -> None:
    param = error.param or ""
    for pattern, name in OWN_NAMES:
        if pattern.match(param):
            error.param = pattern.sub(name, param, count=1)
            if error.message.startswith(param):
                error.message = error.param + error.message.removeprefix(param)
            return
