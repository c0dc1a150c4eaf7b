"""Pythonic dialect, of Llama 3.2 and 4: [name(key=value, ...), ...] as the whole answer, with Python literals."""

from __future__ import annotations

import re
from enum import Enum, auto

from gateway.text.marks import MOST_WHITE
from gateway.text.tools.calls import CallReader, ToolCallPart
from gateway.text.tools.dialect import Place, SplitText, ToolSchemas
from gateway.text.tools.frame import CallFrame
from gateway.text.tools.literals import LiteralReader, json_inside
from gateway.text.tools.python_grammar import python_call

MOST_NAME = 256
"""Maximum number of characters of a tool's name or an argument's key."""
NAME = re.compile(r"[\w.-]+")


class Pythonic:
    marks = closings = hidden = ()
    frame = CallFrame(python_call, opening="[", separator=", ", end="]", text=r"\s*([^\s\[](.|\n)*)?")

    def __init__(self, template: str = "") -> None:
        pass

    @staticmethod
    def is_in(template: str) -> bool:
        return "[func_name1(" in template

    def split(self, known: str, place: Place) -> SplitText:
        if place.spoken or (place.called and not place.inside):
            return SplitText(known, "")
        begin = known.lstrip()
        if not begin:
            return SplitText("", known, inside=place.inside) if len(known) <= MOST_WHITE else SplitText(known, "")
        if place.inside and begin[0] == "]":
            return SplitText(begin[1:], "")
        if begin[0] != ("," if place.inside else "["):
            return SplitText(known, "")
        return SplitText("", begin[1:], known[: len(known) - len(begin) + 1], inside=True)

    def reader(self, index: int, tools: ToolSchemas, *, inside: bool) -> CallReader:
        return PythonCall(index, tools)


class _State(Enum):
    NAME = auto()
    KEY = auto()
    """An argument's key, or the end of the call."""
    VALUE = auto()
    AFTER = auto()
    END = auto()
    BROKEN = auto()


class PythonCall:
    """Parses one call, from its name to its closing parenthesis. All arguments must have keys. It reports nothing
    before the first key, so that text in brackets is not mistaken for a call."""

    def __init__(self, index: int, tools: ToolSchemas) -> None:
        """`index` is the call's number in its answer. A call of a tool that is not among `tools` is no call."""
        self.index = index
        self.begun = False
        self._tools = tools
        self._state = _State.NAME
        self._word: list[str] = []
        """Characters of the current name or key."""
        self._name = ""
        self._value = LiteralReader()
        self._keys: set[str] = set()

    @property
    def ended(self) -> bool:
        return self._state is _State.END

    @property
    def broken(self) -> bool:
        return self._state is _State.BROKEN

    def push(self, text: str) -> tuple[list[ToolCallPart], str]:
        parts: list[ToolCallPart] = []
        written: list[str] = []
        used = len(text)
        for position, character in enumerate(text):
            began = self.begun
            written.append(self._take(character))
            if self.begun and not began:
                parts.append(ToolCallPart(self.index, self._name))
            if self.ended or self.broken:
                used = position + self.ended
                break
        if arguments := "".join(written) + (self._value.written() if self.begun and not self.broken else ""):
            parts.append(ToolCallPart(self.index, arguments=arguments))
        return parts, text[used:]

    def _take(self, character: str) -> str:
        """Parse the next character. Return new text of the arguments, apart from that of the current value."""
        if self._state is _State.VALUE:
            return self._take_value(character)
        if self._state is _State.AFTER:
            return self._take_after(character)
        if character == ("(" if self._state is _State.NAME else "="):
            return self._end_word()
        if character == ")" and not self._text:
            return self._end()
        self._word.append(character)
        if not self._is_begun_word:
            self._state = _State.BROKEN
        return ""

    @property
    def _text(self) -> str:
        return "".join(self._word).strip()

    @property
    def _is_begun_word(self) -> bool:
        """Return whether the characters may become a name or key: white space may only stand around it."""
        return len(self._word) <= MOST_NAME and (not self._text or NAME.fullmatch(self._text) is not None)

    def _end_word(self) -> str:
        word, self._word = self._text, []
        if self._state is _State.NAME:
            self._name, self._state = word, _State.KEY if word in self._tools else _State.BROKEN
            return ""
        if not word or word in self._keys:
            self._state = _State.BROKEN
            return ""
        self._keys.add(word)
        self._state, self._value = _State.VALUE, LiteralReader()
        opening, self.begun = ", " if self.begun else "{", True
        return f'{opening}"{json_inside(word)}": '

    def _take_value(self, character: str) -> str:
        if self._value.take(character):
            return ""
        if self._value.broken:
            self._state = _State.BROKEN
            return self._value.written()
        self._state = _State.AFTER
        return self._value.written() + self._take_after(character)

    def _take_after(self, character: str) -> str:
        if character == ")":
            return self._end()
        if not character.isspace():
            self._state = _State.KEY if character == "," else _State.BROKEN
        return ""

    def _end(self) -> str:
        if self._state is _State.NAME:
            self._state = _State.BROKEN
            return ""
        opening = "" if self.begun else "{"
        self.begun, self._state = True, _State.END
        return opening + "}"
