"""Reader of tool calls that are written as a name, a mark, and the arguments as a JSON object."""

from __future__ import annotations

import re

from gateway.text.marks import begun_mark
from gateway.text.tools.calls import ToolCallPart
from gateway.text.tools.members import Nesting

MOST_HEAD = 256
"""Maximum number of characters before the arguments."""


class NamedCall:
    """Parses a tool call whose arguments follow its name."""

    def __init__(self, index: int, head: re.Pattern[str], closing: str = "") -> None:
        """`index` is the call's number in its answer. `head` matches all before the arguments; its group `name` is the
        tool's name. `closing` ends a call even if its JSON object is incomplete; if empty, the answer's end does."""
        self.index = index
        self.begun = False
        self.ended = False
        self.broken = False
        self._head = head
        self._closing = closing
        self._written = ""
        """The text before the arguments so far."""
        self._held = ""
        """Text after the arguments so far that may be the beginning of the closing mark."""
        self._nesting = Nesting()

    def push(self, text: str) -> tuple[list[ToolCallPart], str]:
        return self._arguments(text) if self.begun else self._name(text)

    def _name(self, text: str) -> tuple[list[ToolCallPart], str]:
        """Parse text before the arguments. If it does not match `head`, the call is broken and all of it is returned as
        rest, in which other tool calls may begin."""
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
        known = self._held + text
        end = known.find(self._closing) if self._closing else -1
        is_closed = end >= 0
        end = end if is_closed else len(known) - begun_mark(known, self._closing)
        used = next((at for at, character in enumerate(known[:end], 1) if self._nesting.take(character)), 0)
        self.ended = used > 0 or is_closed
        self._held = "" if self.ended else known[end:]
        rest = known[used:] if used else known[end + len(self._closing) :] if is_closed else ""
        arguments = known[: used or end]
        return [ToolCallPart(self.index, arguments=arguments)] if arguments else [], rest
