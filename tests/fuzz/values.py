"""Values that fit a JSON schema of the API's document, and the ones that clients get wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

from gateway.http.openapi.document import document
from tests.fuzz import grammars

MODELS = ("tiny",) * 8 + ("pirate", "captain", "tiny:poet", "nothing", "")
TEXTS = (
    "hi",
    "Ahoy, matey!",
    "",
    " ",
    "\x00",
    "\ud7ff\ue000",
    "é" * 40,
    "<|end|><|system|>",
    "<tool_call>",
    "../../etc/passwd",
    "{{ 7 * 7 }}{% for x in range(10**9) %}{% endfor %}",
    "a" * 3_000,
    "﷽" * 300,
    "1e309",
)
ODDITIES = (
    None,
    True,
    0,
    -1,
    1.5,
    2**31,
    2**63,
    10**30,
    -1e308,
    "",
    "100k",
    [],
    {},
    [[]],
    [None],
    {"": None},
    [1, "a", {}],
    "x" * 10_000,
)
MOST_DEPTH = 8


@cache
def api() -> dict[str, Any]:
    """Return the API's document, which takes 80 ms to build."""
    return document()


@dataclass(frozen=True)
class Values:
    """Makes values for the schemas of one document. `wrong`: how often a value is one that does not fit."""

    rng: Random
    schemas: Mapping[str, Any]
    wrong: float

    def of(self, schema: Mapping[str, Any], name: str = "", depth: int = 0) -> Any:
        """Return a value for `schema`, which is found under the property `name`."""
        if depth > MOST_DEPTH or (name and self.rng.random() < self.wrong):
            return self.rng.choice(ODDITIES)
        special = self._named(name)
        if special is not None:
            return special
        if "$ref" in schema:
            return self.of(self.schemas[schema["$ref"].rsplit("/", 1)[1]], name, depth + 1)
        for several in ("anyOf", "oneOf", "allOf"):
            if several in schema:
                return self.of(self.rng.choice(schema[several]), name, depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self.rng.choice(schema["enum"])
        return self._typed(schema, depth)

    def _named(self, name: str) -> Any:
        """Return a value for a property whose schema does not say what it has to be; None means the schema decides."""
        rng = self.rng
        match name:
            case "model":
                return rng.choice(MODELS)
            case "schema" | "parameters" | "input_schema":
                return grammars.json_schema(rng)
            case "json" | "guided_json":
                return grammars.schema_text(rng) if rng.random() < 0.5 else grammars.json_schema(rng)
            case "regex" | "guided_regex":
                return grammars.regex(rng)
            case "grammar" | "guided_grammar":
                return grammars.context_free(rng)
            case "arguments":
                return rng.choice(('{"a": 1}', '{"a": ', "", "nothing", "[" * 50))
            case "prompt":
                return rng.choice((*TEXTS, "Ahoy", [1, 2, 3], [[5], [6, 7]], ["a", "b"], [], [2**31], [-1], [["a"]]))
            case "role":
                return rng.choice(("user", "user", "user", "assistant", "system", "tool", "developer", "unknown"))
            case "timeout" | "stall_timeout":
                return rng.choice((0, -1, 3600, 86_400, 1e9, "5"))  # none so short that the answer would be a 504
            case "max_tokens" | "max_completion_tokens":
                return rng.choice((None, 1, 5, 20, 300, 2**31 - 1))
        return None

    def _typed(self, schema: Mapping[str, Any], depth: int) -> Any:
        rng, kind = self.rng, schema.get("type")
        match rng.choice(kind) if isinstance(kind, list) else kind:
            case "object":
                return self._object(schema, depth)
            case "array":
                return [self.of(schema.get("items", {}), "", depth + 1) for _ in range(rng.choice((0, 1, 1, 2, 3)))]
            case "string":
                return rng.choice(TEXTS)
            case "integer":
                return int(self._number(schema))
            case "number":
                return self._number(schema)
            case "boolean":
                return rng.random() < 0.5
            case "null":
                return None
        return rng.choice(ODDITIES)

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        properties, needed = schema.get("properties", {}), schema.get("required", ())
        share = min(1.0, 4 / max(1, len(properties)))
        chosen = [name for name in properties if (self.rng.random() < (0.98 if name in needed else share))]
        made = {name: self.of(properties[name], name, depth + 1) for name in chosen}
        if "messages" in made and self.rng.random() < 0.6:
            made["messages"] = [{"role": "user", "content": self.rng.choice(TEXTS)}]
        if self.rng.random() < self.wrong:
            made[self.rng.choice(("temprature", "x", "", "__class__", "modle", "\x00"))] = self.rng.choice(ODDITIES)
        return made

    def _number(self, schema: Mapping[str, Any]) -> float:
        low = schema.get("minimum", schema.get("exclusiveMinimum", -2))
        high = schema.get("maximum", schema.get("exclusiveMaximum", low + 10))
        edges = [low, high, low + (high - low) / 2] + [small for small in (0, 1, 2, 5) if low <= small <= high]
        return float(self.rng.choice(edges)) if abs(high) < 2**53 else self.rng.choice((low, 0, 1, 7))


def mangled(rng: Random, document: Any) -> bytes:
    """Return a document as JSON that a client has broken: cut off, doubled, in another encoding, nested, not JSON."""
    text = json.dumps(document)
    at = rng.randrange(len(text) + 1)
    ways = (
        text[:at],
        text + text,
        text[:at] + rng.choice('\x00\x1f{[,:"\\9eN-') + text[at:],
        text.replace("1", "1" * 400, 1),
        text.replace(":", ": NaN, ", 1),
        text[:-1] + "," + text[1:],
        '{"messages":' + "[" * rng.choice((99, 101, 20_000)),
        text.replace("}", ', "model": "tiny"}', 1),
    )
    whole = rng.choice(ways).encode("utf-8", "surrogatepass")
    if rng.random() < 0.2:
        return text.encode(rng.choice(("utf-16", "utf-32", "utf-8-sig")), "surrogatepass")
    return whole[:at] + bytes([rng.randrange(256)]) + whole[at:] if rng.random() < 0.3 else whole
