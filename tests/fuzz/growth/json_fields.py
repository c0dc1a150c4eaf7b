"""Every field of the bodies of the API's document, each with a valid body that has a hole in the field's place."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.fuzz.growth.values import Shape, growths_for
from tests.fuzz.values import api

HOLE = "@hole@"
MOST_DEPTH = 9
"""Levels of fields below a body: those of a tool's call in a message, and of a schema's name in a format."""
Json = Any
Schema = Mapping[str, Any]
VALUES: Mapping[str, Json] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "role": "user",
    "max_tokens": 4,
    "purpose": "batch",
    "parameters": {"type": "object"},
    "input_schema": {"type": "object"},
    "schema": {"type": "object"},
    "arguments": "{}",
    "prompt": "hi",
}
"""Values of members whose schema does not say what they have to be."""
BESIDE: Mapping[str, Mapping[str, Json]] = {
    "json_schema": {"type": "json_schema"},
    "refusal": {"type": "refusal"},
    "tool_calls": {"role": "assistant", "content": ""},
    "reasoning_content": {"role": "assistant"},
    "tool_call_id": {"role": "tool", "content": "hi"},
    "top_logprobs": {"logprobs": True},
    "stream_options": {"stream": True},
    "tool_choice": {"tools": [{"type": "function", "function": {"name": "f"}}]},
    "thinking_token_budget": {"reasoning_effort": "low"},
    "text_1": {"text_2": "hi"},
    "text_2": {"text_1": "hi"},
    "queries": {"documents": ["hi"]},
    "documents": {"query": "hi"},
}
"""What has to stand beside a member so that the gateway reads it."""
OF_TITLE: Mapping[str, Mapping[str, Json]] = {
    "ChatMessage": {"role": "user", "content": "hi"},
    "ContentPart": {"type": "text", "text": "hi"},
    "Tool": {"type": "function", "function": {"name": "f"}},
    "ResponseTool": {"type": "function", "name": "f"},
    "ResponseFormat": {"type": "json_object"},
    "OutputFormat": {"type": "json_schema"},
    "InputItem": {"type": "message", "role": "user", "content": "hi"},
}
"""Members that an object of a schema with this title has, beyond those that are required."""


@dataclass(frozen=True)
class JsonField:
    """One field of a body."""

    path: str
    """As in messages[].content[].text; empty for the whole body."""
    kind: str
    """The schema and member that define it, as in ChatMessage.content; the same one is found below several bodies."""
    shape: Shape
    growths: tuple[str, ...]
    """Names of the ways in which it grows."""
    body: Json
    """A valid body in which HOLE stands in the field's place."""

    def grown(self, value: str) -> str:
        """Return the body as JSON with `value`, a text of JSON, in the field's place."""
        return json.dumps(self.body).replace(json.dumps(HOLE), value, 1)


def json_fields(schema: Schema) -> list[JsonField]:
    """Return all fields of bodies of this schema, each one once."""
    found: dict[str, list[Any]] = {}
    walker = _Walker(api()["components"]["schemas"])
    for path, kind, own, around in walker.fields(schema, "", (), _name(schema) or "body"):
        shape, types, there = walker.shape(own), {walker.type_of(own)}, found.get(path)
        if there is None:
            found[path] = [kind, shape, types, around(HOLE)]
        else:
            there[2] |= types
            there[1] = max(there[1], shape, key=lambda one: (len(one.names), len(one.item)))
    return [
        JsonField(path, kind, shape, growths_for(types), body) for path, (kind, shape, types, body) in found.items()
    ]


def valid_body(schema: Schema) -> Json:
    """Return a small valid body."""
    return _Walker(api()["components"]["schemas"]).valid(schema)


class _Walker:
    def __init__(self, schemas: Mapping[str, Schema]) -> None:
        self._schemas = schemas

    def fields(
        self, schema: Schema, path: str, seen: tuple[str, ...], kind: str
    ) -> Iterator[tuple[str, str, Schema, Callable[[Json], Json]]]:
        """Yield path, kind and schema of the value and of all fields below it, and what puts a value in its place."""
        for option in self._options(schema):
            yield path, kind, option, lambda value: value
            name = _name(option)
            if name and (name in seen or len(seen) > MOST_DEPTH):
                continue
            inside = self._resolved(option)
            yield from self._below(inside, path, (*seen, name) if name else seen, name or kind)

    def _below(self, schema: Schema, path: str, seen: tuple[str, ...], kind: str) -> Iterator[Any]:
        for name, inner in schema.get("properties", {}).items():
            base = {**self.valid(schema), **BESIDE.get(name, {})}
            for at, its_kind, own, around in self.fields(inner, f"{path}.{name}".lstrip("."), seen, f"{kind}.{name}"):
                yield at, its_kind, own, lambda value, a=around, b=base, n=name: {**b, n: a(value)}
        if isinstance(more := schema.get("additionalProperties"), dict):
            for at, its_kind, own, around in self.fields(more, f"{path}{{}}", seen, f"{kind}{{}}"):
                yield at, its_kind, own, lambda value, a=around: {"5": a(value)}
        if "items" in schema:
            for at, its_kind, own, around in self.fields(schema["items"], f"{path}[]", seen, f"{kind}[]"):
                yield at, its_kind, own, lambda value, a=around: [a(value)]

    def type_of(self, schema: Schema) -> str:
        inside = self._resolved(schema)
        kind = inside.get("type", "string" if "enum" in inside or "const" in inside else "any")
        return str(kind[0] if isinstance(kind, list) else kind)

    def shape(self, schema: Schema) -> Shape:
        inside = self._resolved(schema)
        valid = self.valid(inside) if inside.get("type") == "object" else {}
        members = {name: json.dumps(value) for name, value in valid.items()}
        item = json.dumps(self.valid(inside["items"])) if "items" in inside else "0"
        return Shape(item, members, tuple(inside.get("properties", ())))

    def valid(self, schema: Schema, name: str = "") -> Json:
        """Return the smallest valid value."""
        if name in VALUES:
            return VALUES[name]
        inside = self._resolved(self._options(schema)[0])
        if "const" in inside:
            return inside["const"]
        if "enum" in inside:
            return inside["enum"][0]
        match inside.get("type"):
            case "object":
                needed = inside.get("required", ())
                made = {each: self.valid(inside["properties"][each], each) for each in needed}
                return {**made, **OF_TITLE.get(inside.get("title", ""), {})}
            case "array":
                return [self.valid(inside.get("items", {}))] * inside.get("minItems", 0)
            case "string":
                return "a" * max(1, inside.get("minLength", 1))
            case "integer" | "number":
                return max(1, inside.get("minimum", 1))
            case "boolean":
                return True
        return None

    def _options(self, schema: Schema) -> list[Schema]:
        """Return what a value may be, but for null where there is more."""
        several = [each for way in ("anyOf", "oneOf", "allOf") for each in schema.get(way, ())]
        options = [inner for each in several for inner in self._options(each)] or [schema]
        return [each for each in options if each.get("type") != "null"] or options

    def _resolved(self, schema: Schema) -> Schema:
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"].rsplit("/", 1)[1]]
        options = self._options(schema)
        return schema if options == [schema] else self._resolved(options[0])


def _name(schema: Schema) -> str:
    return schema["$ref"].rsplit("/", 1)[1] if "$ref" in schema else ""
