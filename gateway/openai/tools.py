"""OpenAI's tools: checks those that a request offers to the model, and renders the tool calls in its answers."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.api_schema.chat_messages import AssistantCall, Tool, ToolChoice, WrittenTool
from gateway.core.errors import ApiError, invalid_request, unsupported_parameter
from gateway.core.json_bounds import JsonCount
from gateway.requests.types import GenerateRequest, GenerationChunk, Speech
from gateway.text.chat_template import ToolSchema
from gateway.text.tools.calls import ToolCallPart
from gateway.text.tools.dialect import Dialect, schemas_of, spoken_dialect
from gateway.text.tools.parser import Part, ToolParser
from gateway.text.tools.rule import ToolRule

Json = dict[str, Any]

NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


def offered_tools(tools: Sequence[Tool], choice: str | ToolChoice | None = None) -> tuple[Json, ...]:
    """Check `tools` and `tool_choice` of a request, and return the tools in the form that chat templates read. With a
    `choice` of "none" the result is empty, because the model may not call any tool.

    Raises ApiError: INVALID_REQUEST, a name is invalid or used twice, or the choice is unknown or fits no
    tool; UNSUPPORTED_PARAMETER, a tool or the choice is no function.
    """
    names = [_check(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    if len(set(names)) < len(names):
        raise invalid_request("two tools have one name", "tools")
    _check_choice(choice, names)
    return () if choice == "none" else tuple(_shown(tool) for tool in tools)


def tool_rule(tools: Sequence[Tool], choice: str | ToolChoice | None, parallel: bool | None) -> ToolRule:
    """Return the rule for how an answer may call the offered tools, from checked `tools`, `tool_choice` and
    `parallel_tool_calls` (`parallel`), of which only False forbids several calls."""
    functions = [tool.function for tool in tools if tool.function]
    return ToolRule(
        required=choice == "required",
        named=choice.function.name if isinstance(choice, ToolChoice) and choice.function else None,
        strict=frozenset(function.name for function in functions if function.strict),
        parallel=parallel is not False,
    )


def tool_call_reader(request: GenerateRequest, speech: Speech) -> ToolCalls | None:
    """Return a reader of the tool calls in the answers to a request. None means that the request offers no tools.

    Raises ApiError: UNSUPPORTED_PARAMETER, there are tools, but the model's tool calls are not parsed.
    """
    chat = request.offering
    if chat is None:
        return None
    dialect = None if speech.calls_apart else spoken_dialect(speech.dialect)
    return ToolCalls(dialect, chat.tools, parallel=chat.rule.several)


def template_call(call: AssistantCall, count: JsonCount) -> Json:
    """Return a tool call of an earlier answer in the form that chat templates read. `count` bounds the arguments of all
    calls of a request together."""
    function = {"name": call.function.name, "arguments": _arguments(call.function.arguments, count)}
    return {"id": call.id, "type": "function", "function": function}


def _arguments(text: str, count: JsonCount) -> Json | str:
    """Parse the arguments of a tool call. If they are not a JSON object, for example because the model was cut off, or
    exceed a bound of `count`, return the text itself."""
    written = text.encode("utf-8", "surrogatepass") or b"{}"
    try:
        count.add(written)
        arguments = msgspec.json.decode(written)
    except (ApiError, ValueError):  # msgspec.DecodeError is a ValueError
        return text
    return arguments if isinstance(arguments, dict) else text


def _check(tool: Tool, place: str) -> str:
    """Check one tool and return its name. `place` is its path for errors, such as tools[0]. Raises ApiError:
    INVALID_REQUEST, its name is invalid; UNSUPPORTED_PARAMETER, it is no function."""
    if tool.type != "function" or tool.function is None:
        raise unsupported_parameter(f"{place}.type", f"{tool.type[:80]!r} is not supported; tools are functions")
    if not NAME.fullmatch(tool.function.name):
        raise invalid_request("a tool's name has 1 to 64 letters, digits, '_', '.' and '-'", f"{place}.function.name")
    return tool.function.name


def _check_choice(choice: str | ToolChoice | None, names: Sequence[str]) -> None:
    if choice in (None, "auto", "none"):
        return
    if isinstance(choice, str) and choice != "required":
        raise invalid_request("tool_choice must be none, auto, required or name a tool", "tool_choice", "invalid_value")
    if not names:
        raise invalid_request("tool_choice needs tools", "tool_choice")
    if isinstance(choice, ToolChoice):
        _check_named(choice, names)


def _check_named(choice: ToolChoice, names: Sequence[str]) -> None:
    if choice.type != "function":
        raise unsupported_parameter(
            "tool_choice.type", f"{choice.type[:80]!r} is not supported; a choice is a function"
        )
    if choice.function is None:
        raise invalid_request("tool_choice.function is required", "tool_choice.function")
    if choice.function.name not in names:
        raise invalid_request(
            f"tool_choice names {choice.function.name[:80]!r}, which is none of the tools", "tool_choice"
        )


def _shown(tool: Tool) -> Json:
    """Return a tool in the form that chat templates read: as the caller wrote it or, in another API's form, converted
    without additions."""
    assert tool.function is not None
    if isinstance(tool, WrittenTool):
        return tool.written
    given = {"description": tool.function.description, "parameters": tool.function.parameters}
    return {
        "type": "function",
        "function": {"name": tool.function.name} | {name: value for name, value in given.items() if value is not None},
    }


class ChunkContent(msgspec.Struct, frozen=True):
    """Content of one `GenerationChunk`, with the tool calls separated from the text."""

    text: str
    calls: list[Json]
    """The pieces of tool calls in the chunk, one entry for each call, as in the deltas of OpenAI's streams: the call's
    index, new text of its arguments and, if the call begins in this chunk, its id and name."""
    finish_reason: str | None


def text_content(chunk: GenerationChunk) -> ChunkContent:
    """Return the content of a chunk as text without tool calls, for requests that offer no tools."""
    return ChunkContent(chunk.text, [], chunk.finish_reason)


class ToolCalls:
    """Reads the tool calls in the answers to one request. It keeps a parser for each answer."""

    def __init__(self, dialect: Dialect | None, tools: Sequence[ToolSchema], *, parallel: bool = True) -> None:
        """Initialize the reader.

        Args:
            dialect: the syntax in which the model writes tool calls. None means that chunks carry them separately.
            tools: the offered tools.
            parallel: whether an answer may make several calls; otherwise all calls but the first are dropped.
        """
        self._dialect = dialect
        self._tools = schemas_of(tools)
        self._parallel = parallel
        self._parsers: dict[int, ToolParser] = {}
        self._called: set[int] = set()
        """Numbers of the answers that have made a tool call."""

    def read(self, chunk: GenerationChunk) -> ChunkContent:
        """Separate the tool calls of a chunk from its text. The chunks of each answer must be passed in order.

        Returns the text, the pieces of calls, and the finish reason, which is `tool_calls` in place of `stop` if the
        answer made any call. Text that may be the start of a call is held back until it is clear, at the latest until
        the last chunk.
        """
        parts = self.parts(chunk)
        text = "".join(part for part in parts if isinstance(part, str))
        calls = [part for part in parts if isinstance(part, ToolCallPart)]
        called = chunk.answer in self._called and chunk.finish_reason == "stop"
        return ChunkContent(text, _joined(calls), "tool_calls" if called else chunk.finish_reason)

    def parts(self, chunk: GenerationChunk) -> list[Part]:
        """Return the texts and the parts of calls in a chunk as `read` does, but in the order in which the model wrote
        them. Each chunk must be passed to only one of the two methods."""
        parts = self._parsed(chunk) if self._dialect else _apart(chunk)
        if any(isinstance(part, ToolCallPart) for part in parts):
            self._called.add(chunk.answer)
        return [part for part in parts if isinstance(part, str) or self._parallel or part.index == 0]

    def _parsed(self, chunk: GenerationChunk) -> list[Part]:
        assert self._dialect is not None, "otherwise calls come apart"
        if (parser := self._parsers.get(chunk.answer)) is None:
            parser = self._parsers[chunk.answer] = ToolParser(self._dialect, self._tools)
        return parser.push(chunk.text) + (parser.flush() if chunk.finish_reason else [])


def _apart(chunk: GenerationChunk) -> list[Part]:
    """Return the text, if there is any, and the tool calls of a chunk that carries its tool calls separately from its
    text."""
    return [*((chunk.text,) if chunk.text else ()), *chunk.calls]


def _joined(news: Sequence[ToolCallPart]) -> list[Json]:
    """Merge the pieces of each tool call into one entry in OpenAI's format. The entry has a new id and the name if the
    first piece of the call is among them."""
    calls: dict[int, Json] = {}
    for call in news:
        entry = calls.setdefault(call.index, {"index": call.index, "function": {"arguments": ""}})
        if call.name:
            function = {"name": call.name, "arguments": ""}
            entry |= {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
        entry["function"]["arguments"] += call.arguments
    return list(calls.values())
