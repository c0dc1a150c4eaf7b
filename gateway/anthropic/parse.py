"""Parses request bodies of the Messages API, and refuses by name what the gateway does not support."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gateway.anthropic.schema import InputChoice, InputTool, MessagesRequest, OutputConfig, OutputFormat, ThinkingConfig
from gateway.api_schema.chats import ChatRequest, Slo
from gateway.core.errors import unsupported_parameter
from gateway.core.tenants import UnknownFields
from gateway.openai.parse import Body, decode_json, to_struct
from gateway.openai.refused_fields import Refused, fields_of, refuse_unsupported
from gateway.openai.unknown import check_unknown
from gateway.text.tools.results import left_out

UNSUPPORTED: Mapping[str, Refused] = {
    **fields_of(ChatRequest, "is not supported; use /v1/chat/completions"),
    "container": Refused(),
    "mcp_servers": Refused(),
    "output_format": Refused(why="is not supported; use output_config.format"),
    "parallel_tool_calls": Refused((None, True), "is not supported; use tool_choice.disable_parallel_tool_use"),
    "stop": Refused((None, []), "is not supported; use stop_sequences"),
}
"""Fields that this route refuses, besides those that all do (`openai/refused_fields.py`). The fields of chats that
MessagesRequest lacks are among them."""
HARMLESS = frozenset(
    (
        "betas",
        "cache_control",
        "context_management",
        "diagnostics",
        "inference_geo",
        "metadata",
        "speed",
        "user_profile_id",
    )
)
"""Fields of Anthropic's API that have no effect here. They are accepted even where unknown fields are refused. Prefixes
are cached without `cache_control`."""
TOOL_EXTRAS = ("allowed_callers", "cache_control", "defer_loading", "eager_input_streaming", "input_examples")
KNOWN = {
    "": frozenset((*MessagesRequest.__struct_fields__, *UNSUPPORTED)) | HARMLESS,
    "slo": frozenset(Slo.__struct_fields__),
    "tools": frozenset((*InputTool.__struct_fields__, *TOOL_EXTRAS)),
    "tool_choice": frozenset(InputChoice.__struct_fields__),
    "thinking": frozenset((*ThinkingConfig.__struct_fields__, "display")),
    "output_config": frozenset((*OutputConfig.__struct_fields__, "task_budget")),
    "output_config.format": frozenset(OutputFormat.__struct_fields__),
}
"""Known field names of each object in the body, by the object's path; the body itself has an empty path."""
TEXT = frozenset(("text",))
BLOCKS = TEXT | {"thinking", "redacted_thinking", "tool_use", "tool_result"}


def parse(body: bytes, kind: type[Body], unknown: UnknownFields = "ignore") -> Body:
    """Parse a JSON request body into a struct, which is returned.

    Args:
        body: the body as received.
        kind: `MessagesRequest` or `CountTokensRequest`.
        unknown: policy for unknown fields that are not misspellings of known ones; misspellings are always refused.

    Raises:
        ApiError: INVALID_JSON; INVALID_REQUEST, a field is missing, misspelled, of a wrong type or out of range, or
            there are too many or too deeply nested values; UNSUPPORTED_PARAMETER, the body asks for tools that a server
            runs or, outside results of tools, has images, documents or other blocks that are not text.
    """
    document = decode_json(body, kind)
    if isinstance(document, dict):
        _refuse_tools(document)
        check_unknown(document, KNOWN, unknown)
        refuse_unsupported(document, MessagesRequest, UNSUPPORTED)
        _refuse_blocks(document)
        _describe_results(document)
    return to_struct(document, kind)


def _refuse_blocks(document: dict[str, Any]) -> None:
    """Raise ApiError (UNSUPPORTED_PARAMETER) if a content block is of a type that the model cannot read. Values of a
    wrong JSON type are left to the struct's validation."""
    for place, block, allowed in _blocks(document):
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(kind, str) and kind not in allowed:
            raise unsupported_parameter(f"{place}.type", f"{kind[:80]!r} is not supported here; this model reads text")


def _describe_results(document: dict[str, Any]) -> None:
    """Replace what is no text in the results of tools by a sentence that says so. To refuse it would end the session:
    an agent sends all results again with each request."""
    for _, block, _ in _blocks(document):
        content = block.get("content") if isinstance(block, dict) and block.get("type") == "tool_result" else None
        if isinstance(content, list):
            block["content"] = [_described(part) for part in content]


def _described(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    return part if not isinstance(kind, str) or kind in TEXT else {"type": "text", "text": left_out(kind)}


def _blocks(document: dict[str, Any]) -> Iterator[tuple[str, Any, frozenset[str]]]:
    """Yield each content block of a body, except those in results of tools: its path for errors, its value, and the
    block types that are allowed there."""
    yield from _listed(document.get("system"), "system", TEXT)
    for place, message, _ in _listed(document.get("messages"), "messages", frozenset()):
        content = message.get("content") if isinstance(message, dict) else None
        yield from _listed(content, f"{place}.content", BLOCKS)


def _listed(value: Any, place: str, allowed: frozenset[str]) -> Iterator[tuple[str, Any, frozenset[str]]]:
    if isinstance(value, list):
        yield from ((f"{place}[{index}]", member, allowed) for index, member in enumerate(value))


def _refuse_tools(document: dict[str, Any]) -> None:
    """Raise ApiError (UNSUPPORTED_PARAMETER) if a tool is one that Anthropic defines or runs, such as web search."""
    for place, tool, _ in _listed(document.get("tools"), "tools", frozenset()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "custom":
            why = f"{kind[:80]!r} is not supported; a tool has a name and an input_schema, and the caller runs it"
            raise unsupported_parameter(f"{place}.type", why)
