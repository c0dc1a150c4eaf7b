"""Bounds protobuf messages of callers before they are parsed: eight mebibytes of empty chat messages took 0.3 s of the
event loop and 470 MB."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from types import MappingProxyType
from typing import Final, Literal

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from gateway.core.errors import invalid_request
from gateway.core.json_bounds import INTEGERS_PER_VALUE, MOST_VALUES

MOST_FIELDS = 25_000
"""Maximum number of fields of a message and of those in it. A message of a chat has three, a call four: the longest
sessions of agents have some 15,000. To walk over so many takes 8 ms, and to parse them 1 ms."""
MOST_NUMBERS = MOST_VALUES * INTEGERS_PER_VALUE
"""Maximum numbers in lists, as in a JSON body."""
MOST_KEY_BYTES = 1024
"""Maximum bytes of a key of a map. The longest are of metadata, with 64 characters. Each look at the map encodes and
hashes the key: one of seven megabytes held the event loop for 13 ms."""
FEW_BYTES = 50_000
"""Bytes of a message that is not counted, because so few hold the event loop for 3 ms at worst."""
PIECE_BYTES = 64 * 2**10
"""Bytes of a list whose numbers are counted at a time, after which other threads may go on. All eight mebibytes of a
message kept Python's lock from the event loop for 10 ms."""
VARINT, EIGHT_BYTES, LENGTH, FOUR_BYTES = 0, 1, 2, 5
"""Wire types: how the value of a field is written."""
GROUPS = (3, 4)
SIZES: Mapping[int, int] = MappingProxyType({EIGHT_BYTES: 8, FOUR_BYTES: 4})
_KEY: Final = "key"
"""Stands for the key of a map among the fields that are looked at."""
_NOT_LAST = bytes(range(128, 256))
"""Bytes of a varint that are not its last."""


Inner = Mapping[int, Descriptor | Literal["key"] | None]


def check_message(data: bytes, kind: Descriptor) -> None:
    """Check the encoded message of a type before it is parsed. Raises ApiError (INVALID_REQUEST) beyond `MOST_FIELDS`
    fields, `MOST_NUMBERS` numbers in lists, or `MOST_KEY_BYTES` of a key; malformed ones pass if their beginning
    does."""
    if len(data) > FEW_BYTES:
        with suppress(IndexError):  # it is cut off, which the parser refuses
            _walk(data, kind)


def _walk(data: bytes, kind: Descriptor) -> None:
    """Walk over all fields of an encoded message, also of those in it. Raises ApiError; IndexError, it is cut off."""
    fields = numbers = at = 0
    inner, end = _inner(kind), len(data)
    outer: list[tuple[Inner, int]] = []
    """What surrounds the message at the current place: the fields that hold others, and where it ends."""
    while at < len(data):
        while at >= end:
            inner, end = outer.pop()
        fields += 1
        if fields > MOST_FIELDS:
            raise invalid_request(f"a message may have at most {MOST_FIELDS} fields, and this one has more")
        key, at = (data[at], at + 1) if data[at] < 128 else _varint(data, at)
        wire = key & 7
        if wire == LENGTH:
            length, at = (data[at], at + 1) if data[at] < 128 else _varint(data, at)
            number = key >> 3
            if number not in inner:
                at += length
            elif (found := inner[number]) is _KEY:
                at += length
                if length > MOST_KEY_BYTES:
                    raise invalid_request(f"the key of a map may have at most {MOST_KEY_BYTES} bytes")
            elif found is None:
                numbers += _count(data, at, at + length, MOST_NUMBERS - numbers)
                at += length
                if numbers > MOST_NUMBERS:
                    raise invalid_request(f"a message may have at most {MOST_NUMBERS} numbers in lists")
            else:
                outer.append((inner, end))
                inner, end = _inner(found), at + length
        elif wire == VARINT:
            _, at = _varint(data, at)
        elif wire in SIZES:
            at += SIZES[wire]
        elif wire in GROUPS:
            raise invalid_request("a message must not have groups, which proto3 does not know")
        else:
            return  # the parser stops here, too: there is no such wire type


def _count(data: bytes, at: int, end: int, most: int) -> int:
    """Return how many numbers a list has, or some more than `most` if it has more. `end` is what the message says: it
    may lie far behind the data."""
    count, end = 0, min(end, len(data))
    while at < end and count <= most:
        count += len(data[at : min(end, at + PIECE_BYTES)].translate(None, _NOT_LAST))
        at += PIECE_BYTES
    return count


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number that begins at a place in the data, and the place after it."""
    value = shift = 0
    while (byte := data[at]) > 127:
        value |= (byte & 127) << shift
        shift += 7
        at += 1
        if shift > 63:
            raise IndexError("a number is too long")
    return value | byte << shift, at + 1


@cache
def _inner(kind: Descriptor) -> Inner:
    """Return the fields of a message that are looked at, by number: the type of a message, None for a list of numbers,
    and _KEY for the key of a map."""
    lists = (field for field in kind.fields if field.message_type is None and field.is_repeated)
    numbers = {field.number: None for field in lists if field.cpp_type != FieldDescriptor.CPPTYPE_STRING}
    keys = {1: _KEY} if kind.GetOptions().map_entry else {}  # a number as a key is not written as LENGTH
    messages = {field.number: field.message_type for field in kind.fields if field.message_type is not None}
    return {**numbers, **keys, **messages}
