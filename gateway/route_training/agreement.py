"""Decides whether two members' answers agree: equal JSON, or equal texts apart from case, spaces and final marks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

Message = Mapping[str, Any]


def agree(small: Message, large: Message) -> bool:
    """Return whether two assistant messages of the chat API say the same: the same tool calls and the same text."""
    return _calls(small) == _calls(large) and normalised(_text(small)) == normalised(_text(large))


def normalised(text: str) -> Any:
    """Return what is equal for texts that agree: the value of a text that is JSON, else its words in lower case."""
    stripped = text.strip()
    try:
        return msgspec.json.decode(stripped.encode("utf-8", "replace"))
    except (msgspec.DecodeError, RecursionError, ValueError):
        return re.sub(r"\s+", " ", stripped).strip(" .!\"'`").casefold()


def _text(message: Message) -> str:
    return str(message.get("content") or "")


def _calls(message: Message) -> list[tuple[Any, Any]]:
    functions = [call.get("function", {}) for call in message.get("tool_calls") or ()]
    return [(function.get("name"), normalised(str(function.get("arguments", "")))) for function in functions]
