"""Dialect of Qwen3-Coder: <tool_call><function=name><parameter=key>value</parameter></function></tool_call>, with each
mark and value on lines of its own. Values are written as plain text; the tool's schema tells their JSON types."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from gateway.text.marks import begun_mark
from gateway.text.tools.calls import CallReader, ToolCallPart
from gateway.text.tools.dialect import Place, SplitText, ToolSchemas, split_at_marks
from gateway.text.tools.frame import CallFrame
from gateway.text.tools.literals import WORDS, json_inside, python_to_json
from gateway.text.tools.schemas import Schema, kind_of
from gateway.text.tools.xml_grammar import END_VALUE, xml_call

OPENING, CLOSING = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
ENDS = (END_FUNCTION, CLOSING)
"""Marks that end a call. Models sometimes forget the first."""
HEAD = re.compile(r"\s*<function=([\w.-]+)>")
HEAD_BEGUN = re.compile(r"<?|<f|<fu|<fun|<func|<funct|<functi|<functio|<function|<function=[\w.-]*")
KEY = re.compile(r"\s*<parameter=([^<>\n]+)>")
KEY_BEGUN = re.compile(r"<?|<p|<pa|<par|<para|<param|<parame|<paramet|<paramete|<parameter|<parameter=[^<>\n]*")
MOST_MARK = 256
"""Maximum number of characters of a mark, with the white space before it."""
TEXT = frozenset(("string",))


class Qwen3Coder:
    marks = (OPENING, CLOSING)
    closings = (CLOSING, END_FUNCTION)
    hidden = ()
    frame = CallFrame(
        xml_call, mark=OPENING, opening="\n", end=f"{END_FUNCTION}\n{CLOSING}", gap="\n", marks=(OPENING, CLOSING)
    )

    def __init__(self, template: str = "") -> None:
        pass

    @staticmethod
    def is_in(template: str) -> bool:
        return OPENING in template and FUNCTION in template

    def split(self, known: str, place: Place) -> SplitText:
        split = split_at_marks(known, (OPENING, FUNCTION), (CLOSING,) if place.called else ())
        if split.opening is None or split.opening.endswith(OPENING):
            return split
        return SplitText(split.text, FUNCTION + split.rest, split.opening.removesuffix(FUNCTION))

    def reader(self, index: int, tools: ToolSchemas, *, inside: bool) -> CallReader:
        return XmlCall(index, tools)


class XmlCall:
    """Parses one call, from <function=name> to its end mark. It reports nothing before the first parameter or the end,
    so that a mark in a text is not mistaken for a call."""

    def __init__(self, index: int, tools: ToolSchemas) -> None:
        """`index` is the call's number in its answer. `tools` are the schemas that tell the types of the values."""
        self.index = index
        self.begun = False
        self.ended = False
        self.broken = False
        self._tools = tools
        self._name = ""
        self._held = ""
        """Text that is not parsed yet: the beginning of a mark, or of a value's end."""
        self._value: ValueReader | None = None

    def push(self, text: str) -> tuple[list[ToolCallPart], str]:
        text, self._held = self._held + text, ""
        parts: list[ToolCallPart] = []
        while text and not (self.ended or self.broken):
            text = self._in_value(text, parts, self._value) if self._value else self._between(text, parts)
        return parts, text

    def _in_value(self, text: str, parts: list[ToolCallPart], value: ValueReader) -> str:
        """Parse text of a value. Return the text after its end, or an empty string if it goes on."""
        said, end, rest = text.partition(END_VALUE)
        if not end:
            size = begun_mark(text, END_VALUE)
            said, self._held = text[: len(text) - size], text[len(text) - size :]
        if arguments := value.push(said) + (value.end() if end else ""):
            parts.append(ToolCallPart(self.index, arguments=arguments))
        self._value = None if end else value
        return rest

    def _between(self, text: str, parts: list[ToolCallPart]) -> str:
        """Parse text outside values. Return the text that follows, or an empty string if more has to come."""
        if not self._name:
            return self._head(text)
        begin = text.lstrip()
        if match := _match(KEY, text):
            self._begin_value(match[1], parts)
            return text[match.end() :]
        if end := next((mark for mark in ENDS if begin.startswith(mark)), None):
            self._report(parts, "}" if self.begun else "{}")
            self.ended = True
            return begin[len(end) :]
        return self._wait(text, text, KEY_BEGUN.fullmatch(begin) or any(mark.startswith(begin) for mark in ENDS))

    def _head(self, text: str) -> str:
        if match := _match(HEAD, text):
            self._name = match[1]
            return text[match.end() :]
        begin = text[:MOST_MARK].lstrip()
        rest = begin.removeprefix(FUNCTION) + text[MOST_MARK:]
        return self._wait(text, rest, HEAD_BEGUN.fullmatch(begin))

    def _wait(self, text: str, rest: str, may_go_on: object) -> str:
        """Hold back `text`, and return an empty string, if it may still become a mark. Otherwise the call is broken:
        return `rest`, the part of the text that does not belong to the call."""
        if may_go_on and len(text) < MOST_MARK:
            self._held = text
            return ""
        self.broken = True
        return rest

    def _begin_value(self, key: str, parts: list[ToolCallPart]) -> None:
        self._report(parts, f'{", " if self.begun else "{"}"{json_inside(key)}": ')
        parameters = self._tools.get(self._name, {})
        self._value = ValueReader(Schema(parameters, parameters).member(key))

    def _report(self, parts: list[ToolCallPart], arguments: str) -> None:
        """Report text of the arguments, after the name if that has not been reported."""
        if not self.begun:
            self.begun = True
            parts.append(ToolCallPart(self.index, self._name))
        parts.append(ToolCallPart(self.index, arguments=arguments))


def _match(mark: re.Pattern[str], text: str) -> re.Match[str] | None:
    match = mark.match(text)
    return match if match and match.end() <= MOST_MARK else None


class ValueReader:
    """Translates the text of one value to JSON. A value that can only be a string is translated piece by piece. Any
    other value is translated at its end, because its type is not known before."""

    def __init__(self, schema: Schema) -> None:
        self._kinds = schema.kinds()
        self._begun = False
        self._pieces: list[str] = []
        """Pieces of a value that may have another type than string, kept until its end."""
        self._line = ""
        """A line break at the end of the text so far, which is not part of a value if it is its last character."""

    def push(self, text: str) -> str:
        """Parse more of the value. Return new JSON text."""
        if not text:
            return ""
        if not self._begun:
            self._begun, text = True, text.removeprefix("\n")
            opening = '"' if self._kinds == TEXT else ""
        else:
            opening = ""
        text = self._line + text
        self._line = "\n" if text.endswith("\n") else ""
        text = text.removesuffix("\n")
        if self._kinds == TEXT:
            return opening + json_inside(text)
        self._pieces.append(text)
        return ""

    def end(self) -> str:
        """Return the rest of the JSON text, after the last piece of the value."""
        if self._kinds == TEXT:
            return '"' if self._begun else '""'
        return typed("".join(self._pieces), self._kinds)


def typed(text: str, allowed: frozenset[str]) -> str:
    """Return the JSON text of a value that the model wrote as plain text: JSON, or a Python list or dictionary, if its
    type is among `allowed` (empty: any) or strings are not, and otherwise a JSON string."""
    bare = text.strip()
    written = WORDS.get(bare, bare)
    if (kind := _kind(written)) is None and bare[:1] in ("[", "{"):
        written = python_to_json(bare) or ""
        kind = _kind(written)
    fits = not allowed or kind in allowed or (kind == "integer" and "number" in allowed)
    if kind not in (None, "string") and (fits or "string" not in allowed):
        return written
    return f'"{json_inside(text)}"'


def _kind(text: str) -> str | None:
    """Return the type of a JSON text, or None if the text is no JSON."""
    try:
        value: Any = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return None
    return kind_of(value)
