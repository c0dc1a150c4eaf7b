"""What a dialect is: where in an answer's text a tool call begins, what reads the call, and how grammars write it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from gateway.core.errors import unsupported_parameter
from gateway.text.chat_template import ToolSchema, parameters_of
from gateway.text.marks import before_white, begun_mark
from gateway.text.tools.calls import CallReader
from gateway.text.tools.frame import CallFrame

ToolSchemas = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the offered tools' arguments, by the tools' names."""


def schemas_of(tools: Sequence[ToolSchema]) -> ToolSchemas:
    """Return the schemas of some tools, which are in the form that chat templates read."""
    return {tool["function"]["name"]: parameters_of(tool) for tool in tools}


class Place(NamedTuple):
    """What came in the answer before a piece of its text. In some dialects it decides whether a call may begin."""

    called: bool = False
    """True means that there are tool calls before it."""
    spoken: bool = False
    """True means that text of the answer has been shown."""
    inside: bool = False
    """True means that the piece follows a tool call in a list of calls that has not ended."""


@dataclass(frozen=True, slots=True)
class SplitText:
    """The unparsed text of an answer so far, split at the beginning of a tool call."""

    text: str
    """Text to show: everything before the tool call, or before what may become one."""
    rest: str
    """If a tool call begins: the text that its reader parses, so far. Otherwise: text to hold back until more has
    come."""
    opening: str | None = None
    """Text between `text` and what the reader parses, such as the opening mark. None means that no call begins."""
    inside: bool = False
    """True means that a list of tool calls is open from here on."""


class Dialect(Protocol):
    """Dialect in which a model writes tool calls. It keeps no state of an answer."""

    def __init__(self, template: str = "") -> None:
        """`template` is the model's chat template, which tells variants of a dialect apart."""

    @property
    def frame(self) -> CallFrame:
        """Return the format in which grammars make models write tool calls."""

    @property
    def closings(self) -> Sequence[str]:
        """Return the marks after a tool call. One that is cut off at the end of an answer is dropped."""

    @property
    def marks(self) -> Sequence[str]:
        """Return the marks that the parser needs in the text. The detokenizer keeps them even if they are special
        tokens."""

    @property
    def hidden(self) -> Sequence[str]:
        """Return the marks that are special tokens of the models that write this dialect. They are removed from what
        only resembled a tool call."""

    @staticmethod
    def is_in(template: str) -> bool:
        """Return whether a chat template shows tool calls in this dialect."""

    def split(self, known: str, place: Place) -> SplitText:
        """Split `known`, the answer's text that is neither shown nor parsed yet, at the first tool call."""

    def reader(self, index: int, tools: ToolSchemas, *, inside: bool) -> CallReader:
        """Return a reader of the answer's tool call with this number. `inside` says that it is in a list of calls."""


def spoken_dialect(dialect: Dialect | None) -> Dialect:
    """Return `dialect` if it is not None. Raises ApiError (UNSUPPORTED_PARAMETER) if it is, because tool calls of this
    model are not parsed."""
    if dialect is None:
        raise unsupported_parameter("tools", "cannot be used: calls are not read from this model (model.tool_parser)")
    return dialect


def split_at_marks(known: str, openings: Sequence[str], dropped: Sequence[str] = ()) -> SplitText:
    """Split a text at the first of the marks `openings`, which begins a tool call. Text to show has no white space at
    its end and no mark of `dropped`; what may become a mark is held back."""
    begin, opening = min(((at, mark) for mark in openings if (at := known.find(mark)) >= 0), default=(len(known), ""))
    if opening:
        text = without(known[:begin], dropped)
        shown = text.rstrip()
        return SplitText(shown, known[begin + len(opening) :], text[len(shown) :] + opening)
    begun = max(begun_mark(known, mark) for mark in (*openings, *dropped))
    text = without(known[: len(known) - begun], dropped)
    shown = before_white(text)
    return SplitText(shown, text[len(shown) :] + known[len(known) - begun :])


def without(text: str, marks: Sequence[str]) -> str:
    """Return a text without some marks. What their removal puts together stays, even if it is a mark."""
    return re.sub("|".join(map(re.escape, marks)), "", text) if marks else text
