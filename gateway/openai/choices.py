"""Refuses long texts in fields that have a few words to choose from.

msgspec's error quotes the value of such a field as a whole, in one call: with a text of 8 MiB it would hold the
gateway's loop for up to 60 ms.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from msgspec import inspect

from gateway.core.errors import invalid_request

LONGEST = 1024
"""Maximum characters of a choice; longer texts are none of the words."""
EACH = "*"
"""Step of a path that stands for all items of an array, or all values of an object."""

Path = tuple[str, ...]


def refuse_long_choices(document: Any, kind: Any, place: str = "") -> None:
    """Raise ApiError (INVALID_REQUEST), naming the field, if a decoded value has a text of more than LONGEST characters
    where its type `kind`, such as a struct, expects one of a few words. `place` is the value's own field, if any."""
    for path in choice_paths(kind):
        for found_at, value in _values(document, path, place):
            if isinstance(value, str) and len(value) > LONGEST:
                why = f"the value has {len(value):,} characters, and is no choice"
                raise invalid_request(f"{found_at}: {why}", found_at)


@cache
def choice_paths(kind: Any) -> tuple[Path, ...]:
    """Return the paths of a type's fields that have a few words to choose from, tags of unions included."""
    return tuple(sorted(set(_paths(inspect.type_info(kind), ()))))


def _paths(found: inspect.Type, path: Path, above: tuple[type, ...] = ()) -> Iterator[Path]:
    match found:
        case inspect.Metadata():
            yield from _paths(found.type, path, above)
        case inspect.UnionType():
            for member in found.types:
                yield from _paths(member, path, above)
        case inspect.CollectionType():
            yield from _paths(found.item_type, (*path, EACH), above)
        case inspect.DictType():
            yield from _paths(found.value_type, (*path, EACH), above)
        case inspect.LiteralType() | inspect.EnumType():
            yield path
        case inspect.StructType() if found.cls not in above:
            if found.tag_field:
                yield (*path, found.tag_field)
            for field in found.fields:
                yield from _paths(field.type, (*path, field.encode_name), (*above, found.cls))


def _values(document: Any, path: Path, place: str = "") -> Iterator[tuple[str, Any]]:
    """Return the values at a path, each with its place in msgspec's words."""
    if not path:
        yield place, document
        return
    step, rest = path[0], path[1:]
    if step != EACH:
        if isinstance(document, dict) and step in document:
            yield from _values(document[step], rest, f"{place}.{step}" if place else step)
    elif isinstance(document, list):
        for index, item in enumerate(document):
            yield from _values(item, rest, f"{place}[{index}]")
    elif isinstance(document, dict):
        for item in document.values():
            yield from _values(item, rest, f"{place}[...]")
