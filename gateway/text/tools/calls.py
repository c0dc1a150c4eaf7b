"""Tool calls that arrive in pieces: their parts, the protocol of their parsers, and the parser of calls that are JSON
objects."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from gateway.text.tools.members import MemberPiece, ObjectReader

ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True, slots=True)
class ToolCallPart:
    """A part of a tool call. The first part has the name; the arguments of all parts, joined, are a JSON text."""

    index: int
    """Number of the tool call in its answer, from 0."""
    name: str = ""
    arguments: str = ""


class CallReader(Protocol):
    """Incremental parser of one tool call."""

    index: int
    """Number of the call in its answer, from 0."""
    begun: bool
    """True means that the tool's name is known and has been reported."""

    @property
    def ended(self) -> bool:
        """Return whether the call is complete."""

    @property
    def broken(self) -> bool:
        """Return whether the text has turned out to be no tool call or, if the call has `begun`, a malformed one."""

    def push(self, text: str) -> tuple[list[ToolCallPart], str]:
        """Parse the next piece of text. Return new parts of the call, and the text, at the end of all that was passed,
        that is not part of it: empty, unless the call has `ended` or is `broken`."""


class ObjectCall:
    """Parses a tool call that is a JSON object: the member `name`, and the arguments in `arguments` or `parameters`. It
    reports nothing before the name is known, for any order of the members. Missing arguments are reported as {}."""

    def __init__(self, index: int, names: Collection[str] | None = None) -> None:
        """`index` is the call's number in its answer. `names` are the tools' names; an object with another name is no
        tool call. None allows every name."""
        self._object = ObjectReader()
        self.index = index
        self._names = names
        self._name: list[str] = []
        self._key = ""
        """Key of the member that holds the arguments; empty until it has come."""
        self._quoted = False
        """True means that the arguments are written as a JSON string, whose content is then reported."""
        self._is_argued = False
        """True means that the arguments are complete. Further ones of the same key are ignored."""
        self._untold: list[str] = []
        self._refused = False
        self.begun = False

    @property
    def ended(self) -> bool:
        return self._object.ended

    @property
    def broken(self) -> bool:
        return self._refused or self._object.broken or (self.ended and not self.begun)

    def push(self, text: str) -> tuple[list[ToolCallPart], str]:
        pieces, used = self._object.push(text)
        news = [call for piece in pieces for call in self._member(piece)]
        if self.ended and self.begun and not self._key:
            news.append(ToolCallPart(self.index, arguments="{}"))
        return news, text[used:]

    def _member(self, piece: MemberPiece) -> list[ToolCallPart]:
        if piece.key == "name" and not self.begun:
            return self._named(piece)
        return self._argued(piece) if piece.key in ARGUMENTS else []

    def _named(self, piece: MemberPiece) -> list[ToolCallPart]:
        self._name.append(piece.text)
        if not piece.last:
            return []
        name = _said("".join(self._name))
        self._refused = not name or (self._names is not None and name not in self._names)
        if self._refused:
            return []
        self.begun = True
        return [ToolCallPart(self.index, name), *self._tell()]

    def _argued(self, piece: MemberPiece) -> list[ToolCallPart]:
        if not self._key:
            self._key, self._quoted = piece.key, piece.text.startswith('"')
        if piece.key != self._key or self._is_argued:
            return []
        self._is_argued = piece.last
        self._untold.append(piece.text)
        return self._tell() if self.begun and (piece.last or not self._quoted) else []

    def _tell(self) -> list[ToolCallPart]:
        text = "".join(self._untold)
        self._untold.clear()
        if not text:
            return []
        return [ToolCallPart(self.index, arguments=_said(text) if self._quoted else text)]


def _said(written: str) -> str:
    """Return the content of a JSON string, or an empty string if the text is not one.

    An unpaired surrogate, which JSON can express, is replaced because it is no character.
    """
    try:
        text = json.loads(written)
    except ValueError:
        return ""
    return text.encode("utf-8", "replace").decode() if isinstance(text, str) else ""
