"""Converts instructions, input items and tools to the chat that the model reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from gateway.api_schema.chat_messages import AssistantCall, CalledFunction, Function, FunctionName, Tool, ToolChoice
from gateway.core.errors import ApiError, invalid_request, unsupported_parameter
from gateway.core.json_bounds import JsonCount
from gateway.openai.tools import offered_tools, template_call, tool_rule
from gateway.requests.types import Chat
from gateway.responses.schema import InputItem, InputPart, NamedTool, ResponsesRequest, ResponseTool
from gateway.text.chat_template import Message, effort_variables, template_options
from gateway.text.tools.results import left_out

T = TypeVar("T")

ROLES = ("system", "developer", "user", "assistant")
TEXTS = ("input_text", "output_text", "text")
"""Types of the parts that hold text, in the input and in earlier answers."""
REASONING = "reasoning_content"
"""Key of a message's reasoning for chat templates."""


def chat_of(body: ResponsesRequest, history: Sequence[InputItem] = ()) -> Chat:
    """Return the chat of a request. Instructions come first, as a message of the role `system`, then `history`, the
    items of the conversation that the request continues. Raises ApiError: INVALID_REQUEST, an item, a tool or the
    choice of a tool is invalid; UNSUPPORTED_PARAMETER, it is of an unsupported kind."""
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ()) if tool.is_function]
    choice = _choice(body.tool_choice)
    offered = offered_tools(tools, choice)
    effort = body.reasoning.effort if body.reasoning else None
    options = template_options(None, None, body.chat_template_kwargs, effort_variables(effort), effort)
    return Chat(_messages(body, history), offered, tool_rule(tools, choice, body.parallel_tool_calls), options)


def _tool(tool: ResponseTool, place: str) -> Tool:
    if tool.name is None:
        raise invalid_request(f"{place}.name is required", f"{place}.name")
    return Tool(tool.type, Function(tool.name, tool.description, tool.parameters, tool.strict))


def _choice(choice: str | NamedTool | None) -> str | ToolChoice | None:
    if isinstance(choice, NamedTool):
        return ToolChoice(choice.type, None if choice.name is None else FunctionName(choice.name))
    return choice


def _messages(body: ResponsesRequest, history: Sequence[InputItem]) -> tuple[Message, ...]:
    messages: list[Message] = []
    count = JsonCount()
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    for item in history:
        _append(messages, item, "previous_response_id", count)
    if isinstance(body.input, str):
        return (*messages, {"role": "user", "content": body.input})
    if not body.input:
        raise invalid_request("input must not be empty", "input")
    for index, item in enumerate(body.input):
        _append(messages, item, f"input[{index}]", count)
    return tuple(messages)


def _append(messages: list[Message], item: InputItem, place: str, count: JsonCount) -> None:
    """Append an item to the messages. Reasoning, the text after it and calls are one message of the assistant, as they
    were in one answer. `count` bounds the arguments of all calls together."""
    match "item_reference" if item.is_reference else item.type or "message":
        case "message":
            message = _message(item, place)
            if message["role"] == "assistant" and messages and _only_reasons(messages[-1]):
                message |= {REASONING: messages.pop()[REASONING]}
            messages.append(message)
        case "reasoning":
            messages.append({"role": "assistant", "content": "", REASONING: _reasoning(item, place)})
        case "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(_call(item, place, count))
        case "function_call_output":
            output = _output(item.output, f"{place}.output")
            call_id = _given(item.call_id, f"{place}.call_id")
            messages.append({"role": "tool", "content": output, "tool_call_id": call_id})
        case kind:
            raise _unsupported_item(kind, place)


def _only_reasons(message: Message) -> bool:
    return REASONING in message and not message["content"] and "tool_calls" not in message


def _reasoning(item: InputItem, place: str) -> str:
    """Return the text of an item of reasoning, which is empty if another service has encrypted it."""
    if not isinstance(item.content, list):
        return item.content or ""
    return "\n".join(_given(part.text, f"{place}.content[{index}].text") for index, part in enumerate(item.content))


def _unsupported_item(kind: str, place: str) -> ApiError:
    why = "send the item itself" if kind == "item_reference" else "leave the item out"
    return unsupported_parameter(f"{place}.type", f"{kind[:80]!r} is not supported; {why}")


def _message(item: InputItem, place: str) -> Message:
    role = _given(item.role, f"{place}.role")
    if role not in ROLES:
        raise invalid_request(f"unknown role {role[:80]!r}", f"{place}.role")
    content = _text(item.content, role, f"{place}.content")
    return {"role": "system" if role == "developer" else role, "content": content}


def _call(item: InputItem, place: str, count: JsonCount) -> Message:
    function = CalledFunction(_given(item.name, f"{place}.name"), _given(item.arguments, f"{place}.arguments"))
    return template_call(AssistantCall(function, _given(item.call_id, f"{place}.call_id")), count)


def _given(value: T | None, param: str) -> T:
    """Return the value of a field. Raises ApiError: INVALID_REQUEST, the value is None."""
    if value is None:
        raise invalid_request(f"{param} is required", param)
    return value


def _text(content: str | Sequence[InputPart] | None, role: str, place: str) -> str:
    if isinstance(content, str):
        return content
    parts: Sequence[InputPart] = _given(content, place)
    return "\n".join(_part(part, role, f"{place}[{index}]") for index, part in enumerate(parts))


def _output(output: str | Sequence[InputPart] | None, place: str) -> str:
    """Return the text of a tool's result. Parts that are no text, such as an image that an agent has looked at, do not
    end the session, in which they are sent again and again."""
    if isinstance(output, str):
        return output
    parts: Sequence[InputPart] = _given(output, place)
    texts = [part if part.type in TEXTS else InputPart("text", left_out(part.type)) for part in parts]
    return _text(texts, "tool", place)


def _part(part: InputPart, role: str, place: str) -> str:
    if part.type == "refusal" and role == "assistant":
        return _given(part.refusal, f"{place}.refusal")
    if part.type not in TEXTS:
        raise unsupported_parameter(f"{place}.type", f"{part.type[:80]!r} is not supported; this model reads text")
    return _given(part.text, f"{place}.text")
