"""Incremental parser of one JSON object's top-level members. Their values are passed on as written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto


@dataclass(frozen=True, slots=True)
class MemberPiece:
    """A part of the value of the member with the key `key`; `last` says that the value ends with it."""

    key: str
    text: str
    """Text of the piece, as written. All pieces of a value, joined, are the value."""
    last: bool


class Nesting:
    """Finds the end of a JSON object, list or string, character by character. What is inside is not checked."""

    def __init__(self) -> None:
        self.depth = 0
        """Number of objects and lists that are open."""
        self.in_text = False
        self._escaped = False

    def take(self, character: str) -> bool:
        """Return whether the value ends with this character, which is the next of the value."""
        if self.in_text:
            self.in_text = character != '"' or self._escaped
            self._escaped = character == "\\" and not self._escaped
            return not self.in_text and not self.depth
        self.in_text = character == '"'
        self.depth += (character in "{[") - (character in "}]")
        return self.depth == 0 and character in "}]"


class ParserState(Enum):
    """State of an `ObjectReader`: what must come next in the text, apart from white space."""

    OBJECT = auto()
    FIRST_KEY = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_VALUE = auto()
    COMMA = auto()
    END = auto()
    BROKEN = auto()


MARKS: Mapping[ParserState, Mapping[str, ParserState]] = {
    ParserState.OBJECT: {"{": ParserState.FIRST_KEY},
    ParserState.FIRST_KEY: {'"': ParserState.IN_KEY, "}": ParserState.END},
    ParserState.KEY: {'"': ParserState.IN_KEY},
    ParserState.COLON: {":": ParserState.VALUE},
    ParserState.COMMA: {",": ParserState.KEY, "}": ParserState.END},
}
"""Characters that are allowed in each state outside keys and values, and the state that each character leads to."""


class ObjectReader:
    """Splits one JSON object, which comes in parts, into pieces of its members' values. Nested values are not checked
    to be valid JSON. The work is linear in the text, however small the parts are."""

    def __init__(self) -> None:
        self._state = ParserState.OBJECT
        self._key = ""
        self._written: list[str] = []
        """Characters of the current key or value that are in no piece yet."""
        self._nesting = Nesting()
        self._escaped = False

    @property
    def ended(self) -> bool:
        return self._state is ParserState.END

    @property
    def broken(self) -> bool:
        """Return whether the text so far is not the beginning of a JSON object."""
        return self._state is ParserState.BROKEN

    def push(self, text: str) -> tuple[list[MemberPiece], int]:
        """Parse the next part of the text. Return new pieces, and how many characters were consumed: all, unless the
        object has `ended` or is `broken`."""
        pieces: list[MemberPiece] = []
        for position, character in enumerate(text):
            self._take(character, pieces)
            if self.ended or self.broken:
                return pieces, position + self.ended
        if self._state is ParserState.IN_VALUE:
            self._release(pieces, last=False)
        return pieces, len(text)

    def _take(self, character: str, pieces: list[MemberPiece]) -> None:
        if self._state is ParserState.IN_KEY:
            self._take_key(character)
        elif self._state is ParserState.IN_VALUE:
            self._take_value(character, pieces)
        elif not character.isspace():
            self._take_mark(character, pieces)

    def _take_mark(self, character: str, pieces: list[MemberPiece]) -> None:
        if self._state is ParserState.VALUE:
            self._state = ParserState.IN_VALUE
            self._take_value(character, pieces)
        else:
            self._state = MARKS[self._state].get(character, ParserState.BROKEN)

    def _take_key(self, character: str) -> None:
        if character != '"' or self._escaped:
            self._escaped = character == "\\" and not self._escaped
            self._written.append(character)
            return
        try:
            self._key = json.loads('"' + "".join(self._written) + '"')
            self._state = ParserState.COLON
        except ValueError:
            self._state = ParserState.BROKEN
        self._written.clear()

    def _take_value(self, character: str, pieces: list[MemberPiece]) -> None:
        if self._is_outside and (character in ",}" or character.isspace()):
            self._end_value(pieces)  # a number or a literal has no closing character of its own
            if not character.isspace():
                self._take_mark(character, pieces)
            return
        self._written.append(character)
        if self._nesting.take(character):
            self._end_value(pieces)

    @property
    def _is_outside(self) -> bool:
        return not self._nesting.depth and not self._nesting.in_text

    def _end_value(self, pieces: list[MemberPiece]) -> None:
        self._release(pieces, last=True)
        self._state = ParserState.COMMA

    def _release(self, pieces: list[MemberPiece], *, last: bool) -> None:
        pieces.append(MemberPiece(self._key, "".join(self._written), last))
        self._written.clear()
