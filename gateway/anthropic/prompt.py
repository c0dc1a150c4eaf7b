"""Converts the messages and tools of the Messages API to the forms that chat templates read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gateway.anthropic.schema import (
    CHOICES,
    ROLES,
    THINKING,
    Block,
    InputChoice,
    InputMessage,
    InputTool,
    Prompted,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from gateway.core.errors import invalid_request
from gateway.requests.types import Chat
from gateway.text.chat_template import Message, ToolSchema, template_options, thinking_variables
from gateway.text.tools.rule import ToolRule

REASONING = "reasoning_content"
"""Key of a message's reasoning for chat templates."""
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")


def chat_of(body: Prompted) -> Chat:
    """Convert a body to a chat. If the last message is the assistant's, the answer continues its text.

    Raises ApiError: INVALID_REQUEST, there are no messages, or a role, block, tool or choice is invalid.
    """
    tools, choice = body.tools or (), body.tool_choice or InputChoice("auto")
    names = [_checked_name(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    if len(set(names)) < len(names):
        raise invalid_request("two tools have one name", "tools")
    _check_choice(choice, names)
    shown = () if choice.type == "none" else tuple(_shown(tool) for tool in tools)
    messages = _template_messages(body)
    resume = body.messages[-1].role == "assistant"
    if resume and "tool_calls" in messages[-1]:
        raise invalid_request("a tool_use needs a tool_result in the message after it", "messages")
    options = template_options(None, resume, None, _variables(body), _told_effort(body))
    return Chat(messages, shown, _rule(tools, choice), options)


def _variables(body: Prompted) -> dict[str, Any]:
    """Return the template variables that say whether, and how much, the model reasons."""
    effort = body.output_config.effort if body.output_config else None
    variables: dict[str, Any] = {"reasoning_effort": effort} if effort else {}
    if body.thinking is None:
        return variables
    if body.thinking.type not in THINKING:
        raise invalid_request(f"thinking.type must be one of {', '.join(THINKING)}", "thinking.type")
    return variables | thinking_variables(body.thinking.type != "disabled")


def _told_effort(body: Prompted) -> str | None:
    """Return the reasoning effort that an upstream is told: none without thinking, and `high` for `max`, which fewer
    servers know. Whether thinking is on is not told, for lack of a field in OpenAI's API."""
    effort = body.output_config.effort if body.output_config else None
    if body.thinking is not None and body.thinking.type == "disabled":
        return None
    return "high" if effort == "max" else effort


def _template_messages(body: Prompted) -> tuple[Message, ...]:
    if not body.messages:
        raise invalid_request("messages must not be empty", "messages")
    conversation = _Conversation()
    if body.system:
        conversation.say("system", _joined(body.system))
    for index, message in enumerate(body.messages):
        conversation.add(message, f"messages[{index}]")
    return conversation.whole()


class _Conversation:
    """Collects messages for a chat template. Neighbouring turns of one role become one, as in Anthropic's API. Texts
    are joined at the end: one by one, 10,000 blocks after 7 MB would take a minute."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        """The messages so far. Their contents are lists of texts, which `whole` joins."""
        self._names: dict[str, str] = {}
        """Name of the tool by the id of each call so far."""

    def say(self, role: str, text: str) -> None:
        """Append a text to the last message, on a new line, or as a new message if the last one has another role."""
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": []})
        if text:
            self.messages[-1]["content"].append(text)

    def whole(self) -> tuple[Message, ...]:
        """Return the messages with their texts joined, and with the reasoning of each."""
        return tuple({**message, **_joined_fields(message)} for message in self.messages)

    def add(self, message: InputMessage, place: str) -> None:
        if message.role not in ROLES:
            raise invalid_request(f"unknown role {message.role[:80]!r}", f"{place}.role")
        content = message.content or ""
        if isinstance(content, str):
            self.say(message.role, content)
            return
        for index, block in enumerate(content):
            self._add_block(message.role, block, f"{place}.content[{index}]")

    def _add_block(self, role: str, block: Block, place: str) -> None:
        if isinstance(block, TextBlock):
            self.say(role, block.text)
        elif isinstance(block, ThinkingBlock | RedactedThinkingBlock):
            self._think(role, block, place)
        elif isinstance(block, ToolUseBlock):
            self._call(role, block, place)
        else:
            self._result(role, block, place)

    def _think(self, role: str, block: ThinkingBlock | RedactedThinkingBlock, place: str) -> None:
        if role != "assistant":
            raise invalid_request("only an assistant's message may have a thinking block", f"{place}.type")
        self.say(role, "")
        if isinstance(block, ThinkingBlock):
            self.messages[-1].setdefault(REASONING, []).append(block.thinking)

    def _call(self, role: str, block: ToolUseBlock, place: str) -> None:
        if role != "assistant":
            raise invalid_request("only an assistant's message may have a tool_use", f"{place}.type")
        self.say(role, "")
        self._names[block.id] = block.name
        function = {"name": block.name, "arguments": block.input}
        calls = self.messages[-1].setdefault("tool_calls", [])
        calls.append({"id": block.id, "type": "function", "function": function})

    def _result(self, role: str, block: ToolResultBlock, place: str) -> None:
        if role != "user":
            raise invalid_request("only a user's message may have a tool_result", f"{place}.type")
        if block.tool_use_id not in self._names:
            raise invalid_request("there is no tool_use with this id before it", f"{place}.tool_use_id")
        name = self._names[block.tool_use_id]
        told = {"tool_call_id": block.tool_use_id, "name": name, "content": [_joined(block.content or "")]}
        self.messages.append({"role": "tool", **told})


def _joined_fields(message: Message) -> Message:
    return {name: "\n".join(message[name]) for name in ("content", REASONING) if name in message}


def _joined(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _checked_name(tool: InputTool, place: str) -> str:
    """Check one tool and return its name. `place` is its path for errors. Raises ApiError: INVALID_REQUEST, its name is
    invalid."""
    if not NAME.fullmatch(tool.name):
        raise invalid_request("a tool's name has 1 to 128 letters, digits, '_', '.' and '-'", f"{place}.name")
    return tool.name


def _check_choice(choice: InputChoice, names: Sequence[str]) -> None:
    if choice.type not in CHOICES:
        raise invalid_request(f"tool_choice.type must be one of {', '.join(CHOICES)}", "tool_choice.type")
    if choice.type in ("any", "tool") and not names:
        raise invalid_request("tool_choice needs tools", "tool_choice")
    if choice.type == "tool" and choice.name not in names:
        raise invalid_request("tool_choice.name must name one of the tools", "tool_choice.name")


def _shown(tool: InputTool) -> ToolSchema:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _rule(tools: Sequence[InputTool], choice: InputChoice) -> ToolRule:
    return ToolRule(
        required=choice.type == "any",
        named=choice.name if choice.type == "tool" else None,
        strict=frozenset(tool.name for tool in tools if tool.strict),
        parallel=not choice.disable_parallel_tool_use,
    )
