"""Dialects in which models write tool calls: where in a text a call begins, and which dialect a model uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from gateway.text.marks import MOST_WHITE, before_white, begun_mark

ToolParserName = Literal["auto", "hermes", "llama3", "none"]


@dataclass(frozen=True, slots=True)
class SplitText:
    """The unparsed text of an answer so far, split at the beginning of a tool call."""

    text: str
    """Text to show: everything before the tool call, or before what may become one."""
    rest: str
    """If a tool call begins: the text of its JSON object so far. Otherwise: text to hold back until more has come."""
    opening: str | None = None
    """Text between `text` and the call's object, such as the opening mark. None means that no call begins."""


@dataclass(frozen=True, slots=True)
class CallFrame:
    """Format of a tool call in a dialect: mark, padding, {"name": ..., KEY: ...}, padding, end."""

    mark: str
    """Opening mark of a tool call, anywhere in the text. Empty means that tool calls must be the whole answer."""
    end: str
    padding: str
    separator: str
    """Text between two tool calls."""
    key: str
    """Key of the object's member that holds the arguments."""


class Dialect(Protocol):
    any_name: bool
    """True means that any name makes a tool call. Otherwise an object that names no tool is part of the answer's
    text."""
    frame: CallFrame

    def split(self, known: str, *, called: bool, spoken: bool) -> SplitText:
        """Split `known`, the answer's text that is neither shown nor parsed yet, at the first tool call. `called` says
        that the answer has a tool call before it; `spoken` says that text of the answer has been shown."""


class Hermes:
    """Dialect of Hermes, Qwen 2.5 and 3: <tool_call>{"name": ..., "arguments": ...}</tool_call> anywhere in a text."""

    any_name = True
    OPENING = "<tool_call>"
    CLOSING = "</tool_call>"
    frame = CallFrame(OPENING, CLOSING, "\n", "\n", "arguments")

    def split(self, known: str, *, called: bool, spoken: bool) -> SplitText:
        text, opening, rest = known.partition(self.OPENING)
        if called:
            text = text.replace(self.CLOSING, "")
        if opening:
            shown = text.rstrip()
            return SplitText(shown, rest, text[len(shown) :] + opening)
        marks = (self.OPENING, self.CLOSING) if called else (self.OPENING,)
        begun = max(begun_mark(text, mark) for mark in marks)
        shown = before_white(text[: len(text) - begun])
        return SplitText(shown, text[len(shown) :])


class Llama3:
    """Dialect of Llama 3: {"name": ..., "parameters": ...} as the whole answer; several are separated by semicolons."""

    any_name = False
    SEPARATORS = "; \t\r\n"
    frame = CallFrame("", "", "", "; ", "parameters")

    def split(self, known: str, *, called: bool, spoken: bool) -> SplitText:
        if spoken:
            return SplitText(known, "")
        begin = known.lstrip(self.SEPARATORS if called else None)
        if not begin:
            return SplitText("", known) if len(known) <= MOST_WHITE else SplitText(known, "")
        return SplitText("", begin, known[: -len(begin)]) if begin[0] == "{" else SplitText(known, "")


def choose_dialect(name: ToolParserName, template: str) -> Dialect | None:
    """Return the dialect that the setting `name` asks for; `auto` detects it from the model's chat template. None means
    that tool calls are not parsed: the template has no tools or an unknown dialect, or `name` is `none`."""
    if name == "none" or "tools" not in template:
        return None
    if name == "auto":
        return _spoken_in(template)
    return Hermes() if name == "hermes" else Llama3()


def _spoken_in(template: str) -> Dialect | None:
    if Hermes.OPENING in template:
        return None if "<function=" in template else Hermes()  # Qwen3-Coder writes XML inside the same marks
    return Llama3() if '"parameters"' in template and "ipython" in template else None
