"""Where in a text calls begin, dialect by dialect, and which dialect a model speaks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

ToolParserName = Literal["auto", "hermes", "llama3", "none"]


@dataclass(frozen=True, slots=True)
class Split:
    """What is known of a text so far."""

    text: str
    """For the reader, up to the call or what may become one."""
    rest: str
    """Where a call begins, its object; else what has to wait for more."""
    opening: str | None = None
    """What stands between the text and a call; None: no call begins."""


@dataclass(frozen=True, slots=True)
class Frame:
    """How a call is written: mark, padding, {"name": ..., KEY: ...}, padding, end."""

    mark: str
    """What tells a call from text wherever it stands; empty: calls are told by being all of an answer."""
    end: str
    padding: str
    separator: str
    """Between two calls."""
    key: str
    """Of the arguments."""


class Dialect(Protocol):
    any_name: bool
    """Whether a call is one whatever it names. Otherwise an object that names no tool is part of the answer."""
    frame: Frame

    def split(self, known: str, *, called: bool, spoken: bool) -> Split:
        """`called`: there was a call before. `spoken`: there is text that stands before this."""


class Hermes:
    """<tool_call>{"name": ..., "arguments": ...}</tool_call>, anywhere: Hermes, Qwen 2.5 and 3."""

    any_name = True
    OPENING = "<tool_call>"
    CLOSING = "</tool_call>"
    frame = Frame(OPENING, CLOSING, "\n", "\n", "arguments")

    def split(self, known: str, *, called: bool, spoken: bool) -> Split:
        text, opening, rest = known.partition(self.OPENING)
        if called:
            text = text.replace(self.CLOSING, "")
        if opening:
            shown = text.rstrip()
            return Split(shown, rest, text[len(shown) :] + opening)
        marks = (self.OPENING, self.CLOSING) if called else (self.OPENING,)
        begun = max(_begun(text, mark) for mark in marks)
        shown = text[: len(text) - begun].rstrip()
        return Split(shown, text[len(shown) :])


class Llama3:
    """{"name": ..., "parameters": ...} as all of an answer, several with a semicolon between: Llama 3."""

    any_name = False
    SEPARATORS = "; \t\r\n"
    frame = Frame("", "", "", "; ", "parameters")

    def split(self, known: str, *, called: bool, spoken: bool) -> Split:
        if spoken:
            return Split(known, "")
        begin = known.lstrip(self.SEPARATORS if called else None)
        if not begin:
            return Split("", known)
        return Split("", begin, known[: -len(begin)]) if begin[0] == "{" else Split(known, "")


def choose_dialect(name: ToolParserName, template: str) -> Dialect | None:
    """`template`: the model's chat template. None: it has no tools, or speaks of them in another way."""
    if name == "none" or "tools" not in template:
        return None
    if name == "auto":
        return _spoken_in(template)
    return Hermes() if name == "hermes" else Llama3()


def _spoken_in(template: str) -> Dialect | None:
    if Hermes.OPENING in template:
        return None if "<function=" in template else Hermes()  # Qwen3-Coder's calls are XML inside the same marks
    return Llama3() if '"parameters"' in template and "ipython" in template else None


def _begun(text: str, mark: str) -> int:
    """Characters at the end of a text that may become a mark."""
    return next((size for size in range(len(mark) - 1, 0, -1) if text.endswith(mark[:size])), 0)
