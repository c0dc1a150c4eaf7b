"""JSON schemas of tools' arguments: which types a value may have, and the properties of an object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from reprlib import repr as short
from typing import Any, NamedTuple

from gateway.core.json_bounds import MAX_DEPTH

Json = Mapping[str, Any]

TYPES = frozenset(("string", "integer", "number", "boolean", "null", "array", "object"))
NOTES = frozenset(
    ("$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description", "examples", "title")
)
"""Keywords that do not restrict a value: annotations and definitions."""
OBJECT = frozenset(("type", "properties", "required", "additionalProperties"))
MOST_REFERENCES = 20
MOST_ALTERNATIVES = 256
"""Maximum number of schemas that one value is compared with, of `anyOf` and `oneOf`. They are looked at for each value
that a model writes, on the event loop: 256 take 2 ms."""


class Schema(NamedTuple):
    """A JSON schema `body`, and the document `root` in which its references (`$ref`) are looked up."""

    body: Any
    root: Json

    def at(self, body: Any) -> Schema:
        return Schema(body, self.root)

    def resolved(self) -> Schema:
        """Return the schema itself or, if it is a reference (`$ref`), the schema that it leads to. Raises ValueError if
        that is not in the document, or if references form a circle."""
        body = self.body
        for _ in range(MOST_REFERENCES):
            if not isinstance(body, Mapping) or "$ref" not in body:
                return self.at(body)
            body = self._referred(str(body["$ref"]))
        raise ValueError("a $ref refers to itself")

    def _referred(self, reference: str) -> Any:
        found: Any = self.root
        for key in reference.removeprefix("#").split("/", MAX_DEPTH)[1:]:  # what is left over is no key
            name = key.replace("~1", "/").replace("~0", "~")
            if not reference.startswith("#") or not isinstance(found, Mapping) or name not in found:
                raise ValueError(f"the $ref {reference[:80]!r} is not in it")
            found = found[name]
        return found

    def member(self, key: str) -> Schema:
        """Return the schema of the property `key` of an object; a schema that allows anything if the object's schema
        does not name this property."""
        try:
            body = self.resolved().body
        except ValueError:
            body = None
        properties = body.get("properties") if isinstance(body, Mapping) else None
        return self.at(properties.get(key, True) if isinstance(properties, Mapping) else True)

    @property
    def keywords(self) -> frozenset[str]:
        """The keywords that allow or forbid something."""
        return frozenset(self.body) - NOTES if isinstance(self.body, Mapping) else frozenset()

    def check_keywords(self, known: frozenset[str]) -> None:
        """Raise ValueError if the schema restricts its values by other keywords than `known`, or allows no value at
        all."""
        if self.body is False or not isinstance(self.body, Mapping | bool):
            raise ValueError(f"{short(self.body)} allows nothing")
        if unknown := sorted(self.keywords - known):
            raise ValueError(f"{unknown[0]} is not supported in calls of this model (model.tool_parser)")

    def alternatives(self) -> list[Schema]:
        """Return schemas one of which each value must match: those of `anyOf` or `oneOf`, or one for each listed type.
        Raises ValueError if there are other keywords beside these, or a schema allows nothing."""
        found: list[Schema] = []
        for schema in self._spread():
            if schema.body is not True and not isinstance(schema.body, Mapping):
                raise ValueError(f"{short(schema.body)} allows nothing")
            if schema.choices:
                schema.check_keywords(frozenset(("anyOf", "oneOf", "type")))
                continue
            found += schema._by_type()
        return found

    def _by_type(self) -> list[Schema]:
        """Return the schema once for each of its types, if it lists several."""
        types = self.body.get("type") if isinstance(self.body, Mapping) else None
        if not isinstance(types, list) or self.values is not None:
            return [self]
        return [self.at({**self.body, "type": one}) for one in types]

    def _spread(self) -> Iterator[Schema]:
        """Yield the schema and all that it reaches through references, `anyOf` and `oneOf`, each once. Raises
        ValueError if a reference leads nowhere, or there are more than `MOST_ALTERNATIVES`."""
        waiting, seen = [self.resolved()], set()
        while waiting:
            schema = waiting.pop(0)
            if id(schema.body) in seen:
                continue
            seen.add(id(schema.body))
            if len(seen) + len(waiting) + len(schema.choices) > MOST_ALTERNATIVES:
                raise ValueError(f"a value may have at most {MOST_ALTERNATIVES} alternatives in calls of this model")
            yield schema
            waiting += [schema.at(one).resolved() for one in schema.choices]

    @property
    def choices(self) -> list[Any]:
        """The schemas in `anyOf` or `oneOf`; empty if the schema has neither."""
        lists = [self.body.get(keyword) for keyword in ("anyOf", "oneOf")] if isinstance(self.body, Mapping) else []
        return next((one for one in lists if isinstance(one, list)), [])

    def kinds(self) -> frozenset[str]:
        """Return the JSON types that the schema allows, as far as `type`, `enum`, `const`, `anyOf`, `oneOf` and `$ref`
        tell. Empty means that they do not tell, or that the schema has a bad `$ref` or over `MOST_ALTERNATIVES`
        alternatives."""
        try:
            found = [schema._own_kinds() for schema in self._spread() if not schema.choices]
        except ValueError:
            return frozenset()
        return frozenset().union(*found) if all(found) else frozenset()

    def _own_kinds(self) -> frozenset[str]:
        types = self.body.get("type") if isinstance(self.body, Mapping) else None
        if isinstance(types, str | list):
            return frozenset([types] if isinstance(types, str) else map(str, types)) & TYPES
        return frozenset(map(kind_of, self.values or ()))

    @property
    def values(self) -> list[Any] | None:
        """The only values that are allowed. None means that no list of them is given."""
        if not isinstance(self.body, Mapping):
            return None
        if "const" in self.body:
            return [self.body["const"]]
        return self.body["enum"] if isinstance(self.body.get("enum"), list) else None


def kind_of(value: Any) -> str:
    """Return the type of a JSON value, by its name in schemas."""
    if isinstance(value, str):
        return "string"
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else "number"
    return "array" if isinstance(value, list) else "object"
