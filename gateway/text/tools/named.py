"""Reader of tool calls that are written as a name, a mark, and the arguments as a JSON object."""

from __future__ import annotations

import re

from gateway.text.tools.calls import ToolCallPart
from gateway.text.tools.members import Nesting

MOST_HEAD = 256
"""Maximum number of characters before the arguments."""


class NamedCall:
    """Parses a tool call whose arguments follow its name."""

    def __init__(self, index: int, head: re.Pattern[str]) -> None:
        """`index` is the call's number in its answer. `head` matches all that comes before the arguments; its group
        `name` is the tool's name."""
        self.index = index
        self.begun = False
        self.ended = False
        self.broken = False
        self._head = head
        self._written = ""
        """The text before the arguments so far."""
        self._nesting = Nesting()

    def push(self, text: str) -> tuple[list[ToolCallPart], str]:
        return self._arguments(text) if self.begun else self._name(text)

    def _name(self, text: str) -> tuple[list[ToolCallPart], str]:
        head, brace, _ = text.partition("{")
        self._written += head
        match = self._head.fullmatch(self._written) if brace else None
        self.begun = match is not None
        if match is None:
            self.broken = bool(brace) or len(self._written) > MOST_HEAD
            return [], text[len(head) :] if self.broken else ""
        parts, rest = self._arguments(text[len(head) :])
        return [ToolCallPart(self.index, match["name"]), *parts], rest

    def _arguments(self, text: str) -> tuple[list[ToolCallPart], str]:
        used = next((at for at, character in enumerate(text, 1) if self._nesting.take(character)), 0)
        self.ended = used > 0
        used = used or len(text)
        return [ToolCallPart(self.index, arguments=text[:used])] if used else [], text[used:]
