"""Decides whether two members' answers agree, by the rule of cascades."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.routes import acceptance
from gateway.routes.acceptance import HeldAnswer

Message = Mapping[str, Any]


def agree(small: Message, large: Message) -> bool:
    """Return whether two assistant messages of the chat API say the same."""
    return acceptance.agree(_answer(small), _answer(large))


def _answer(message: Message) -> HeldAnswer:
    functions = [call.get("function", {}) for call in message.get("tool_calls") or ()]
    calls = [(str(function.get("name")), str(function.get("arguments", ""))) for function in functions]
    return HeldAnswer(str(message.get("content") or ""), "", calls=calls)
