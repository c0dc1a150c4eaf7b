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
        """Parse text before the arguments. If it is no name, all of it is text, which may have marks of its own."""
        text, self._written = self._written + text, ""
        head, brace, _ = text[: MOST_HEAD + 1].partition("{")
        if match := self._head.fullmatch(head) if brace else None:
            self.begun = True
            parts, rest = self._arguments(text[len(head) :])
            return [ToolCallPart(self.index, match["name"]), *parts], rest
        self.broken = bool(brace) or len(text) > MOST_HEAD
        if not self.broken:
            self._written = text
        return [], text if self.broken else ""

    def _arguments(self, text: str) -> tuple[list[ToolCallPart], str]:
        used = next((at for at, character in enumerate(text, 1) if self._nesting.take(character)), 0)
        self.ended = used > 0
        used = used or len(text)
        return [ToolCallPart(self.index, arguments=text[:used])] if used else [], text[used:]
