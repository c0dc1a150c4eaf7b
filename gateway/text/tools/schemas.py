"""JSON schemas of tools' arguments: which types a value may have, and the properties of an object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

Json = Mapping[str, Any]

TYPES = frozenset(("string", "integer", "number", "boolean", "null", "array", "object"))
NOTES = frozenset(
    ("$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description", "examples", "title")
)
"""Keywords that allow and forbid nothing."""
OBJECT = frozenset(("type", "properties", "required", "additionalProperties"))
MOST_REFERENCES = 20


class Schema(NamedTuple):
    """A schema inside a document, whose definitions its references name."""

    body: Any
    root: Json

    def at(self, body: Any) -> Schema:
        return Schema(body, self.root)

    def resolved(self) -> Schema:
        """Return the schema with its reference, if it is one, replaced by what it refers to. Raises ValueError if that
        is not in the document."""
        body = self.body
        for _ in range(MOST_REFERENCES):
            if not isinstance(body, Mapping) or "$ref" not in body:
                return self.at(body)
            body = self._referred(str(body["$ref"]))
        raise ValueError("a $ref refers to itself")

    def _referred(self, reference: str) -> Any:
        found: Any = self.root
        for key in reference.removeprefix("#").split("/")[1:]:
            name = key.replace("~1", "/").replace("~0", "~")
            if not reference.startswith("#") or not isinstance(found, Mapping) or name not in found:
                raise ValueError(f"the $ref {reference!r} is not in it")
            found = found[name]
        return found

    @property
    def keywords(self) -> frozenset[str]:
        """The keywords that allow or forbid something."""
        return frozenset(self.body) - NOTES if isinstance(self.body, Mapping) else frozenset()

    def check_keywords(self, known: frozenset[str]) -> None:
        """Raise ValueError if the schema has other keywords than these, or is no object."""
        if self.body is False or not isinstance(self.body, Mapping | bool):
            raise ValueError(f"{self.body!r} allows nothing")
        if unknown := sorted(self.keywords - known):
            raise ValueError(f"{unknown[0]} is not supported in calls of this model (model.tool_parser)")

    def alternatives(self) -> list[Schema]:
        """Return the schemas of which a value follows one: those of `anyOf` or `oneOf`, or one for each type. Raises
        ValueError if there are other keywords beside these."""
        schema = self.resolved()
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema.keywords:
                schema.check_keywords(frozenset((keyword, "type")))
                return [inner for one in schema.body[keyword] for inner in schema.at(one).alternatives()]
        types = schema.body.get("type") if isinstance(schema.body, Mapping) else None
        if isinstance(types, list) and "enum" not in schema.keywords:
            return [schema.at({**schema.body, "type": one}) for one in types]
        return [schema]

    @property
    def values(self) -> list[Any] | None:
        """The only values that are allowed. None means that no list of them is given."""
        if not isinstance(self.body, Mapping) or not {"enum", "const"} & set(self.body):
            return None
        return [self.body["const"]] if "const" in self.body else list(self.body["enum"])


def kinds(schema: Schema, depth: int = 0) -> frozenset[str]:
    """Return the JSON types that a schema allows, as far as `type`, `enum`, `const`, `anyOf`, `oneOf` and `$ref` say;
    empty means that it does not say."""
    if depth > MOST_REFERENCES:
        return frozenset()
    try:
        schema = schema.resolved()
    except ValueError:
        return frozenset()
    if not isinstance(schema.body, Mapping):
        return frozenset()
    types = schema.body.get("type")
    if isinstance(types, str | list):
        return frozenset([types] if isinstance(types, str) else map(str, types)) & TYPES
    if schema.values is not None:
        return frozenset(map(kind_of, schema.values))
    inner = schema.body.get("anyOf") or schema.body.get("oneOf")
    found = [kinds(schema.at(one), depth + 1) for one in inner] if isinstance(inner, list) else []
    return frozenset().union(*found) if all(found) else frozenset()


def kind_of(value: Any) -> str:
    """Return the type of a JSON value, by its name in schemas."""
    if isinstance(value, str):
        return "string"
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else "number"
    return "array" if isinstance(value, list) else "object"
