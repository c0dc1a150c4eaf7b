"""Grammar expressions for the arguments of a tool call: which arguments the tool's schema allows, and which it
requires."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gateway.text.tools.frame import Rules
from gateway.text.tools.schemas import OBJECT, Schema

EMPTY = '""'


class Argument(NamedTuple):
    """A property of an object."""

    key: str
    schema: Schema
    required: bool


def arguments_of(schema: Schema) -> list[Argument] | None:
    """Return the properties of an object, in the schema's order. None means that the schema names none and allows any.
    Raises ValueError if the schema has keywords other than `OBJECT`, or requires a property that it does not name."""
    schema.check_keywords(OBJECT)
    body = schema.body
    properties, required = body.get("properties", {}), body.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise ValueError("properties must be an object and required a list")
    if missing := [key for key in required if key not in properties]:
        raise ValueError(f"it requires {missing[0]!r}, which is none of its properties")
    if not properties and body.get("additionalProperties", True) is not False:
        return None
    return [Argument(key, schema.at(inner), key in required) for key, inner in properties.items()]


def in_order(terms: Sequence[tuple[str, bool]], separator: str, rules: Rules) -> str:
    """Return the grammar expression for `terms`, (expression, whether required), in their order with a separator
    between any two. The number of rules added is linear in that of terms."""
    first = rest = EMPTY
    for term, required in reversed(terms):
        name = rules.add(term)
        first, rest = (
            rules.add(f"{name} {rest}" if required else f"{name} {rest} | {first}"),
            rules.add(f"{separator} {name} {rest}" if required else f"({separator} {name})? {rest}"),
        )
    return first
