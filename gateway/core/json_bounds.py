"""Bounds JSON texts from callers before they are decoded, so that decoding one, and every later walk over it, takes a
few milliseconds and little memory. Eight mebibytes of `[[],[],...` took 4 s and 3 GB."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import accumulate, chain
from typing import Any

from gateway.core.errors import ApiError, invalid_request

MOST_VALUES = 40_000
"""Maximum number of values: lists, objects and their members. The longest sessions of agents have some 3,000 messages
and calls, which are 20,000 values; tools of 400 kB have as many again. To decode so many takes at most 5 ms, to make a
chat of them 30 ms in a thread, and to write tools of so many for a template 20 ms without a pause."""
INTEGERS_PER_VALUE = 10
"""Integers of a list that count as one value, because they are decoded ten times as fast: a list may have 400,000 token
ids, which take 12 ms."""
DIGITS_OF_INTEGER = 7
"""Digits that a number may have without counting as several integers: to decode one of 19 digits takes three times as
long. No token id has more."""
CHARACTERS_PER_VALUE = 1000
"""Characters of a decoded text that take a template as long as a value does."""
MAX_DEPTH = 100
"""Maximum levels of nested lists and objects, because later code walks them recursively. OpenAI allows schemas 10
levels of objects, which are 20 of these."""
MOST_DIGITS = 100
"""Maximum digits of a number, which may be twice as many if it spans two pieces. No double needs more than 17. Python
takes a time that grows with the square of the digits: 2,000 integers of 4,000 digits took 150 ms."""
FEW_VALUES = 10
"""Brackets and commas of a text, in strings or not, up to which they count as values without a closer look, which takes
some microseconds."""
PIECE_BYTES = 64 * 1024
"""Bytes that are counted at a time."""

_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
"""Makes of each bracket the step of the level that it causes, as a signed byte."""
_INTEGERS = b"-0123456789 \t\r\n"
"""Bytes of integers and of the white space around them."""
_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_TOO_MANY_DIGITS = b"0" * (MOST_DIGITS + 1)
_COUNTED = (str, dict, list, tuple)
"""Types of the members that `has_more_values` looks into. As a union in the call, they were built for each member."""


def check_json(text: bytes, field: str | None = None) -> None:
    """Raise ApiError (INVALID_REQUEST) if a JSON text has more than `MOST_VALUES` values, more than `MAX_DEPTH` levels
    or a number of more than `MOST_DIGITS` digits. `field` is the request field that holds the text; None means that it
    is the body. A text that is not valid JSON passes if its valid beginning keeps the bounds."""
    if len(text) <= MOST_VALUES and text.count(b"[") + text.count(b"{") <= MAX_DEPTH:
        return  # so few bytes cannot have too many values: this is the way of almost all bodies
    JsonCount().add(text, field)


def has_more_values(document: Any, most: int) -> bool:
    """Return whether a decoded document has more than `most` members in its lists, tuples and objects; a text, also a
    member's name, counts as one for each CHARACTERS_PER_VALUE. The work is bounded by `most`."""
    left, unseen = most, [document]
    while unseen and left >= 0:
        value = unseen.pop()
        if isinstance(value, str):
            left -= len(value) // CHARACTERS_PER_VALUE
            continue
        inner = value.values() if isinstance(value, dict) else value
        left -= len(inner)
        if left >= 0:
            held = chain(value, inner) if isinstance(value, dict) else inner
            unseen += [one for one in held if isinstance(one, _COUNTED)]
    return left < 0


class JsonCount:
    """Counts the values of one JSON text, or of several that are bounded together."""

    def __init__(self) -> None:
        self._values = self._integers = 0

    def add(self, text: bytes, field: str | None = None) -> None:
        """Count another text. Raises ApiError as `check_json` does, if all texts have too many values together or this
        one has too many levels or digits."""
        brackets = text.count(b"[") + text.count(b"{")
        if len(text) <= PIECE_BYTES and (few := brackets + text.count(b",")) <= FEW_VALUES:
            self._values += few
            self._check_values(field)
            return
        in_string, level = False, 0
        for piece in _pieces(text):
            bare, in_string = _without_strings(piece, in_string)
            zeros = bare.translate(_ZEROS)
            if _TOO_MANY_DIGITS in zeros:
                raise _refusal(f"has a number of more than {MOST_DIGITS} digits", field)
            bare = bare.translate(None, _INTEGERS)
            self._count(bare, zeros.count(b"0"))
            self._check_values(field)
            levels = list(accumulate(array("b", bare.translate(_STEPS, _NO_BRACKETS)), initial=level))
            level = levels[-1]
            if max(levels) > MAX_DEPTH:
                raise _refusal(f"is nested more than {MAX_DEPTH} levels deep", field)

    def _count(self, bare: bytes, digits: int) -> None:
        """Count the values in a piece of JSON with so many digits, given without integers and the contents of
        strings."""
        commas = bare.count(b",")
        integers = bare.replace(b",", b"<>").count(b"><") if commas else 0  # commas that had an integer between them
        self._integers += integers + max(0, digits // DIGITS_OF_INTEGER - commas)
        self._values += bare.count(b"[") + bare.count(b"{") + commas - integers

    def _check_values(self, field: str | None) -> None:
        if self._values + self._integers // INTEGERS_PER_VALUE > MOST_VALUES:
            most = f"{MOST_VALUES} lists, objects and members of these, or {MOST_VALUES * INTEGERS_PER_VALUE} integers"
            raise _refusal(f"has more than {most}", field)


def _pieces(text: bytes) -> Iterator[bytes]:
    """Yield a text in pieces of about `PIECE_BYTES` bytes, none of which ends within an escape sequence."""
    start = 0
    while start < len(text):
        piece = text[start : start + PIECE_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = text[start : start + PIECE_BYTES + 1]
        yield piece
        start += len(piece)


def _without_strings(piece: bytes, in_string: bool) -> tuple[bytes, bool]:
    """Return a piece of JSON with every string in it replaced by an empty one, and whether it ends within a string.
    `in_string` says whether it begins within one."""
    if b"\\\\" in piece:  # else all of its backslashes escape the next character; each replacement takes 1 ms a MB
        piece = piece.replace(b"\\\\", b"")
    if b'\\"' in piece:
        piece = piece.replace(b'\\"', b"")
    parts = piece.split(b'"')
    outside = parts[1::2] if in_string else parts[::2]
    return b'""'.join(outside), in_string ^ (len(parts) % 2 == 0)


def _refusal(fault: str, field: str | None) -> ApiError:
    return invalid_request(f"{field or 'the body'} {fault}", field)
