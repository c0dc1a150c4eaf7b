"""Refuses long texts in fields that have a few words to choose from.

msgspec's error quotes the value of such a field as a whole, in one call: with a text of 8 MiB it would hold the
gateway's loop for up to 60 ms.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from msgspec import inspect

from gateway.core.errors import invalid_request

LONGEST = 1024
"""Maximum characters of a choice; longer texts are none of the words."""
EACH = "*"
"""Step of a path that stands for all items of an array, or all values of an object."""
CONTAINERS, CONTAINERS_AND_TEXTS = frozenset((dict, list)), frozenset((dict, list, str))
"""Types of items that are looked at. A body may have hundreds of thousands of numbers."""

Path = tuple[str, ...]


@dataclass(slots=True)
class Branch:
    """Knowledge of the values at one path: whether they are choices, and where below them there are choices."""

    is_choice: bool = False
    below: dict[str, Branch] = field(default_factory=dict)
    """By member; EACH stands for all items or values."""


def refuse_long_choices(document: Any, kind: Any, place: str = "") -> None:
    """Raise ApiError (INVALID_REQUEST), naming the field, if a decoded value has a text of more than LONGEST characters
    where its type `kind`, such as a struct, expects one of a few words. `place` is the value's own field, if any."""
    if (found := _long_choice(document, _branches(kind))) is not None:
        param = f"{place}{found}".removeprefix(".")
        raise invalid_request(f"{param}: the value has more than {LONGEST:,} characters, and is no choice", param)


@cache
def choice_paths(kind: Any) -> tuple[Path, ...]:
    """Return the paths of a type's fields that have a few words to choose from, tags of unions included."""
    return tuple(sorted(set(_paths(inspect.type_info(kind), ()))))


@cache
def _branches(kind: Any) -> Branch:
    root = Branch()
    for path in choice_paths(kind):
        branch = root
        for step in path:
            branch = branch.below.setdefault(step, Branch())
        branch.is_choice = True
    return root


def _long_choice(value: Any, branch: Branch) -> str | None:
    """Return the path, in msgspec's words, from a value to the first choice in it that is too long; None: there is
    none."""
    if type(value) is str:
        return "" if branch.is_choice and len(value) > LONGEST else None
    each = branch.below.get(EACH)
    if type(value) is dict:
        for step, below in branch.below.items():
            if step in value and (found := _long_choice(value[step], below)) is not None:
                return f".{step}{found}"
        return _in_items(value.values(), each) if each else None
    return _in_items(value, each) if each and type(value) is list else None


def _in_items(items: Iterable[Any], branch: Branch) -> str | None:
    wanted = CONTAINERS_AND_TEXTS if branch.is_choice else CONTAINERS
    for index, item in enumerate(items):
        if type(item) in wanted and (found := _long_choice(item, branch)) is not None:
            return f"[{index}]{found}"
    return None


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
            for one in found.fields:
                yield from _paths(one.type, (*path, one.encode_name), (*above, found.cls))
