"""Incremental parser of one JSON object's top-level members. Their values are passed on as written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one member's value."""

    key: str
    text: str
    """Text of the piece, as written. All pieces of a value, joined, are the value."""
    last: bool


class Place(Enum):
    """State of the parser: what comes next in the text, apart from white space."""

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


MARKS: Mapping[Place, Mapping[str, Place]] = {
    Place.OBJECT: {"{": Place.FIRST_KEY},
    Place.FIRST_KEY: {'"': Place.IN_KEY, "}": Place.END},
    Place.KEY: {'"': Place.IN_KEY},
    Place.COLON: {":": Place.VALUE},
    Place.COMMA: {",": Place.KEY, "}": Place.END},
}
"""Characters that are allowed in each state, and the state that each character leads to."""


class ObjectReader:
    """Splits a JSON object into pieces of its members. The work is linear in the text, even if the text comes in small
    parts."""

    def __init__(self) -> None:
        self._place = Place.OBJECT
        self._key = ""
        self._written: list[str] = []
        """Characters of the current key or value that are in no piece yet."""
        self._depth = 0
        self._in_text = False
        self._escaped = False

    @property
    def ended(self) -> bool:
        return self._place is Place.END

    @property
    def broken(self) -> bool:
        """Return whether the text so far is not the beginning of a JSON object."""
        return self._place is Place.BROKEN

    def push(self, text: str) -> tuple[list[Piece], int]:
        """Return pieces, and how many characters were consumed: all, unless the object has `ended` or is `broken`."""
        pieces: list[Piece] = []
        for position, character in enumerate(text):
            self._take(character, pieces)
            if self.ended or self.broken:
                return pieces, position + self.ended
        if self._place is Place.IN_VALUE:
            self._release(pieces, last=False)
        return pieces, len(text)

    def _take(self, character: str, pieces: list[Piece]) -> None:
        if self._place is Place.IN_KEY:
            self._take_key(character)
        elif self._place is Place.IN_VALUE:
            self._take_value(character, pieces)
        elif not character.isspace():
            self._take_mark(character, pieces)

    def _take_mark(self, character: str, pieces: list[Piece]) -> None:
        if self._place is Place.VALUE:
            self._place = Place.IN_VALUE
            self._take_value(character, pieces)
        else:
            self._place = MARKS[self._place].get(character, Place.BROKEN)

    def _take_key(self, character: str) -> None:
        if character != '"' or self._escaped:
            self._escaped = character == "\\" and not self._escaped
            self._written.append(character)
            return
        try:
            self._key = json.loads('"' + "".join(self._written) + '"')
            self._place = Place.COLON
        except ValueError:
            self._place = Place.BROKEN
        self._written.clear()

    def _take_value(self, character: str, pieces: list[Piece]) -> None:
        if self._depth == 0 and not self._in_text and (character in ",}" or character.isspace()):
            self._end_value(pieces)  # a number or a literal has no closing character of its own
            if not character.isspace():
                self._take_mark(character, pieces)
            return
        self._written.append(character)
        if self._in_text:
            self._take_text(character)
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
        elif character == '"':
            self._in_text = True
            return
        if self._depth == 0 and not self._in_text and character in '"}]':
            self._end_value(pieces)

    def _take_text(self, character: str) -> None:
        self._in_text = character != '"' or self._escaped
        self._escaped = character == "\\" and not self._escaped

    def _end_value(self, pieces: list[Piece]) -> None:
        self._release(pieces, last=True)
        self._place = Place.COMMA

    def _release(self, pieces: list[Piece], *, last: bool) -> None:
        pieces.append(Piece(self._key, "".join(self._written), last))
        self._written.clear()
