"""Ways in which a JSON value grows: each makes a text of JSON with some number of bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

MERSENNE = 2**61 - 1
"""Python's hash of an integer is its remainder by this number."""
WIDE = "\U0001f600"


class Shape(NamedTuple):
    """What the ways need to know of a field."""

    item: str = "0"
    """A valid item of its list, as JSON."""
    members: Mapping[str, str] = MappingProxyType({})
    """Its valid members, as JSON by name; required ones alone."""
    names: tuple[str, ...] = ("model",)
    """Names of all members that it may have."""


Growth = Callable[[int, Shape], str]


def _quoted(piece: str, width: int | None = None) -> Growth:
    """Return a growth whose value is a text of these pieces, which are escaped already and `width` bytes each."""
    return lambda size, shape: f'"{piece * max(1, size // (width or len(piece.encode())))}"'


def _listed(piece: str) -> Growth:
    return lambda size, shape: _list([piece] * max(1, size // (len(piece) + 1)))


def _list(pieces: Iterable[str]) -> str:
    return "[" + ",".join(pieces) + "]"


def _items(size: int, shape: Shape) -> str:
    return _list([shape.item] * max(1, size // (len(shape.item.encode()) + 1)))


def _colliding_items(size: int, shape: Shape) -> str:
    return _list(str(MERSENNE * number) for number in range(1, size // 24 + 2))


def _object(members: Iterable[str]) -> str:
    return "{" + ",".join(members) + "}"


def _keys(size: int, shape: Shape) -> str:
    return _object(f'"k{number}":0' for number in range(size // 10 + 1))


def _colliding_keys(size: int, shape: Shape) -> str:
    return _object(f'"{MERSENNE * number}":0' for number in range(1, size // 28 + 2))


def _number_keys(size: int, shape: Shape) -> str:
    return _object(f'"{number}":0' for number in range(size // 10 + 1))


def _near_names(size: int, shape: Shape) -> str:
    """Return an object whose names are one edit from those that the field knows, as misspellings are."""
    names = shape.names or ("model",)
    width = max(map(len, names)) + 10
    near = (f'"{names[number % len(names)][:-1]}{number}":0' for number in range(size // width + 1))
    return _object([*_pairs(shape), *near])


def _same_name(size: int, shape: Shape) -> str:
    return _object(['"a":0'] * (size // 6 + 1))


def _repeated_member(size: int, shape: Shape) -> str:
    """Return an object that has its own members again and again."""
    pairs = _pairs(shape) or ['"a":[]']
    return _object(pairs * (size // (sum(len(pair.encode()) + 1 for pair in pairs)) + 1))


def _long_name(size: int, shape: Shape) -> str:
    return _object([*_pairs(shape), f'"{"x" * size}":0'])


def _escaped_names(size: int, shape: Shape) -> str:
    return _object(f'"\\u0000\\ud83d\\ude00{number}":""' for number in range(size // 32 + 1))


def _pairs(shape: Shape) -> list[str]:
    return [f"{json.dumps(name)}:{value}" for name, value in shape.members.items()]


def _nested(begin: str, end: str, middle: str = "") -> Growth:
    def grown(size: int, shape: Shape) -> str:
        depth = max(1, size // (len(begin) + len(end)))
        return begin * depth + middle + end * depth

    return grown


def _branches(size: int, shape: Shape) -> str:
    """Return lists in lists, two in each, 90 levels deep where the size allows: deep and wide at once."""
    inner, depth = "0", 0
    while len(inner) * 2 < size and depth < 12:
        inner, depth = f"[{inner},{inner}]", depth + 1
    inner = "[" * (90 - depth) + inner + "]" * (90 - depth)
    return _list([inner] * max(1, size // (len(inner) + 1)))


def _integer(size: int, shape: Shape) -> str:
    return "9" * size


def _fraction(size: int, shape: Shape) -> str:
    return "0." + "1" * size


def _exponent(size: int, shape: Shape) -> str:
    return "1e" + "9" * size


def _spaces_around(size: int, shape: Shape) -> str:
    return " " * size + "0"


STRUCTURES: Mapping[str, Growth] = {
    "items": _items,
    "empty lists": _listed("[]"),
    "empty objects": _listed("{}"),
    "empty texts": _listed('""'),
    "zeros": _listed("0"),
    "nulls": _listed("null"),
    "floats": _listed("1.7976931348623157e308"),
    "objects": _listed('{"a":[]}'),
    "colliding items": _colliding_items,
    "names": _keys,
    "colliding names": _colliding_keys,
    "numbers as names": _number_keys,
    "near names": _near_names,
    "one name": _same_name,
    "own members again": _repeated_member,
    "a long name": _long_name,
    "escaped names": _escaped_names,
    "lists in lists": _nested("[", "]"),
    "objects in objects": _nested('{"a":', "}", "0"),
    "schemas in schemas": _nested('{"properties":{"a":', "}}", "{}"),
    "branches": _branches,
    "open brackets": _nested("[", ""),
}
SCALARS: Mapping[str, Growth] = {
    "letters": _quoted("a"),
    "escapes": _quoted("\\u0000"),
    "surrogates": _quoted("\\ud800"),
    "wide letters": _quoted(WIDE),
    "combining marks": _quoted("e\u0301\u0323"),
    "brackets": _quoted("["),
    "parentheses": _quoted("("),
    "digits": _quoted("9"),
    "spaces": _quoted(" "),
    "words": _quoted("word "),
    "lines": _quoted("a\\n"),
    "special tokens": _quoted("<|end|>"),
    "tool calls": _quoted("<tool_call>"),
    "an integer": _integer,
    "a fraction": _fraction,
    "an exponent": _exponent,
    "spaces before": _spaces_around,
}
TEXTS_OF_JSON = ("empty lists", "objects", "colliding names", "one name", "lists in lists", "near names", "branches")
"""Structures that are also sent as texts, for fields that hold JSON as text."""


def _as_text(structure: Growth) -> Growth:
    def grown(size: int, shape: Shape) -> str:
        return json.dumps(structure(size * 4 // 5, shape))

    return grown


GROWTHS: Mapping[str, Growth] = {
    **SCALARS,
    **STRUCTURES,
    **{f"JSON text of {name}": _as_text(STRUCTURES[name]) for name in TEXTS_OF_JSON},
}
"""All ways by name. The size of what they make is roughly the one wanted, and never much above it."""
TEXTS = tuple(name for name in GROWTHS if name in SCALARS and GROWTHS[name](1, Shape()).startswith('"')) + tuple(
    f"JSON text of {name}" for name in TEXTS_OF_JSON
)
"""Names of the ways that make texts."""
EVERYWHERE = (
    *("letters", "an integer", "an exponent", "spaces before", "JSON text of empty lists"),
    *("empty lists", "objects", "colliding names", "one name", "lists in lists", "objects in objects", "open brackets"),
)
"""Names of the ways for every field, whatever its schema says: what is read before a schema is looked at."""


def growths_for(types: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the ways for a field that takes values of these types of JSON; "any" is one, too."""
    wanted = set(EVERYWHERE)
    for kind in types:
        wanted |= set(TEXTS) if kind in ("string", "any") else set()
        wanted |= set(STRUCTURES) if kind in ("array", "object", "any") else set()
        wanted |= {"a fraction"} if kind in ("number", "integer", "any") else set()
    return tuple(name for name in GROWTHS if name in wanted)
