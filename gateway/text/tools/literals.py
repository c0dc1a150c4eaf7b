"""Incremental translation of one Python literal to JSON."""

from __future__ import annotations

import json
import re
from enum import Enum, auto

MAX_DEPTH = 100
"""Maximum levels of nested lists and dictionaries."""
MOST_WORD = 400
"""Maximum number of characters of a number."""
WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
JSON_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
PYTHON_NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][+-]?\d+)?|[+-]?0[xXoObB][0-9a-fA-F_]+", re.ASCII)
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""}
ESCAPED = {**ESCAPES, **{character: character for character in "\\'\"/"}}
CODES = {"x": 2, "u": 4, "U": 8}
"""Number of hexadecimal digits after a backslash and this letter."""
HIGH = range(0xD800, 0xDC00)
"""First halves of surrogate pairs, with which JSON writes characters beyond 16 bits."""
LOW = range(0xDC00, 0xE000)


class _State(Enum):
    VALUE = auto()
    FIRST = auto()
    """Right after the opening of a list or dictionary, or after a comma: a value, or the end."""
    WORD = auto()
    TEXT = auto()
    AFTER = auto()


class LiteralReader:
    """Translates one Python literal, character by character: strings, numbers, True, False, None (also as JSON spells
    them), lists, and dictionaries whose keys are strings. It evaluates nothing."""

    def __init__(self) -> None:
        self.broken = False
        self._state = _State.VALUE
        self._open: list[str] = []
        """Closing characters of the lists and dictionaries that are open."""
        self._is_key = False
        """True means that the current or next value is the key of a dictionary."""
        self._comma = False
        """True means that a comma is due before the next value."""
        self._word = ""
        """The current number or name so far."""
        self._text = PythonText("")
        self._written: list[str] = []

    def written(self) -> str:
        """Return the JSON text that was translated since the last call of this method."""
        text = "".join(self._written)
        self._written.clear()
        return text

    def take(self, character: str) -> bool:
        """Parse the next character. Return False if the literal is complete without it, or is `broken`."""
        if self._state is _State.TEXT:
            self._take_text(character)
            return not self.broken
        if self._state is _State.WORD:
            if character.isalnum() or character in "_.+-":
                self._word += character
                self.broken = len(self._word) > MOST_WORD
                return not self.broken
            self._end_word()
        if self.broken or (self._state is _State.AFTER and not self._open):
            return False
        if not character.isspace():
            self._take_mark(character)
        return not self.broken

    @property
    def complete(self) -> bool:
        return self._state is _State.AFTER and not self._open

    def end(self) -> None:
        """End the literal if it is a number or a name, which have no end of their own."""
        if self._state is _State.WORD:
            self._end_word()

    def _take_mark(self, character: str) -> None:
        if self._open and character == self._open[-1] and self._state in (_State.FIRST, _State.AFTER):
            self._close(character)
        elif self._state is _State.AFTER:
            self._take_separator(character)
        elif character in "'\"":
            self._begin(_State.TEXT, '"')
            self._text = PythonText(character)
        elif self._is_key:
            self.broken = True
        elif character in "[{":
            self._begin(_State.FIRST, character)
            self._open.append("]" if character == "[" else "}")
            self._is_key, self._comma = character == "{", False
            self.broken = len(self._open) > MAX_DEPTH
        else:
            self._begin(_State.WORD, "")
            self._word = character

    def _begin(self, state: _State, opening: str) -> None:
        self._written.append((", " if self._comma else "") + opening)
        self._state, self._comma = state, False

    def _close(self, character: str) -> None:
        if self._is_key and self._state is _State.AFTER:  # a key without a value
            self.broken = True
            return
        self._written.append(character)
        self._open.pop()
        self._end_value()

    def _take_separator(self, character: str) -> None:
        if character == ":" and self._is_key:
            self._written.append(": ")
            self._is_key, self._comma, self._state = False, False, _State.VALUE
        elif character == "," and not self._is_key:
            self._is_key, self._comma, self._state = self._open[-1] == "}", True, _State.FIRST
        else:
            self.broken = True

    def _take_text(self, character: str) -> None:
        self._written.append(self._text.take(character))
        self.broken = self._text.broken
        if self._text.ended:
            self._written.append('"')
            if self._is_key:
                self._state = _State.AFTER
            else:
                self._end_value()

    def _end_word(self) -> None:
        word = WORDS.get(self._word) or _json_number(self._word)
        self.broken = not word
        self._written.append(word)
        self._end_value()

    def _end_value(self) -> None:
        self._state, self._is_key = _State.AFTER, False


class PythonText:
    """Translates the inside of one Python string to the inside of a JSON string."""

    def __init__(self, quote: str) -> None:
        self.ended = False
        self.broken = False
        self._quote = quote
        self._escape = ""
        """An unfinished escape sequence, from its backslash."""
        self._high = 0
        """The first half of a surrogate pair, whose second half may follow; 0 means none."""

    def take(self, character: str) -> str:
        """Parse the next character. Return the JSON text that it completes, which may be empty."""
        if self._escape:
            self._escape += character
            return self._escaped()
        if character == "\\":
            self._escape = character
            return ""
        self.ended = character == self._quote
        return self._said("" if self.ended else character)

    def _escaped(self) -> str:
        """Return the text of the escape sequence if it is complete."""
        letter, digits = self._escape[1], self._escape[2:]
        if letter not in CODES:
            said = ESCAPED.get(letter, self._escape)
        elif len(digits) < CODES[letter]:
            return ""
        else:
            code = _code(digits)
            if code in HIGH:
                self._escape, before = "", self._said("")
                self._high = code
                return before
            if code in LOW and self._high:
                code, self._high = 0x10000 + ((self._high - HIGH[0]) << 10) + code - LOW[0], 0
            self.broken = not 0 <= code < 0x110000
            said = "" if self.broken else chr(code)
        self._escape = ""
        return self._said(said)

    def _said(self, text: str) -> str:
        """Return `text` escaped for a JSON string. If the first half of a surrogate pair still waits for its second
        half, it is unpaired now, and U+FFFD comes before the text in its place."""
        if self._high:
            text, self._high = "\N{REPLACEMENT CHARACTER}" + text, 0
        return json_inside(text)


def json_inside(text: str) -> str:
    """Return a text as it stands between the quotes of a JSON string. Unpaired surrogates become U+FFFD."""
    if text.isascii():
        return json.dumps(text)[1:-1]
    text = "".join("\N{REPLACEMENT CHARACTER}" if "\ud800" <= character < "\ue000" else character for character in text)
    return json.dumps(text, ensure_ascii=False)[1:-1]


def python_to_json(text: str) -> str | None:
    """Return a Python literal as JSON, or None if the text is not one that `LiteralReader` can read."""
    reader = LiteralReader()
    for character in text:
        if not reader.take(character) and (reader.broken or not character.isspace()):
            return None
    reader.end()
    return reader.written() if reader.complete and not reader.broken else None


def _code(digits: str) -> int:
    """Return the number that hexadecimal digits write, or -1 if they are not hexadecimal digits."""
    return int(digits, 16) if all(digit in "0123456789abcdefABCDEF" for digit in digits) else -1


def _json_number(word: str) -> str:
    """Return a Python number as JSON writes it, or an empty string if the word is no number."""
    if JSON_NUMBER.fullmatch(word):
        return word
    if not PYTHON_NUMBER.fullmatch(word):
        return ""
    try:
        return str(int(word, 0))
    except ValueError:
        pass
    try:
        number = float(word)
    except ValueError:
        return ""
    is_real = not word.lstrip("+-").isdigit() and abs(number) < float("inf")  # 007 is no number of Python's
    return repr(number) if is_real else ""
