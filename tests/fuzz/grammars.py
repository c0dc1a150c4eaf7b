"""Grammars that a hostile tenant would send: each kind has crashed, stalled or swollen a compiler of grammars."""

from __future__ import annotations

import json
from random import Random
from typing import Any

NUMBERS = (-(2**63), -(2**63) + 1, 2**63, 2**64, -1e308, 1e308, 1e-308, -1e30, 10**40, -0.0, 0, 1)
PATTERNS = (
    "(a+)+$",
    "(a|a)*b",
    "^.*a.*b.*c.*$",
    "a{60000}",
    "(a{300}){300}",
    "(?=a)b",
    "(a)\\1",
    "[\\p{L}--a]+",
    "(?P<n>a)(?P=n)",
    "[",
    "\\",
    "(" * 200 + ")" * 200,
    "[a-\U0010ffff]{1,200}",
    "(?i)\u00df|\u017f|\u212a",
    "",
)
LARK = (
    'start: "a" start | "a"',
    "start: start",
    "start: a\na: b\nb: a",
    "start: /(a+)+/",
    'start: ("a" | "b"){1,100000}',
    "%import common.NUMBER\nstart: NUMBER",
    '%ignore /\\s+/\nstart: "x"',
    "start: <[1-1000000]>",
    "start: %json {}",
    'start[capture]: "a"',
    "%llguidance {}",
    "start",
    "",
)
GBNF = (
    'root ::= "a" root | "b"',
    "root ::= root",
    "root ::= [a-z]{1,90000}",
    "root ::= (",
    'root ::= "\\x"',
    "root ::=",
)


def json_schema(rng: Random) -> Any:
    """Return a JSON schema, or something that poses as one."""
    hostile = (_number, _pattern, _all_of, _references, _nested, _wide, _lengths, _odd)
    return rng.choice(hostile)(rng) if rng.random() < 0.7 else _object(rng)


def schema_text(rng: Random) -> str:
    """Return a schema as a document, sometimes one that is cut off or nested too deeply for a parser."""
    if rng.random() < 0.05:
        return rng.choice(('{"items":', "[", '{"not":')) * rng.choice((50, 5_000))
    text = json.dumps(json_schema(rng))
    return text[: rng.randrange(len(text))] if rng.random() < 0.1 else text


def regex(rng: Random) -> str:
    """Return a regular expression: one of the known ones, or two of them joined."""
    joint = rng.choice(("", "|", "(?:", "{2}"))
    return rng.choice(PATTERNS) + joint + rng.choice(("", *PATTERNS)) if rng.random() < 0.5 else rng.choice(PATTERNS)


def context_free(rng: Random) -> str:
    """Return a grammar in Lark's notation or in GBNF."""
    if rng.random() < 0.1:
        return _chain(rng.choice((30, 300, 3_000)))
    text = rng.choice(LARK + GBNF)
    at = rng.randrange(len(text) + 1)
    return text[:at] + rng.choice(("\x00", "(", '"', "|", "ÿ", "\n")) + text[at:] if rng.random() < 0.3 else text


def _chain(rules: int) -> str:
    links = "\n".join(f"a{number}: a{number + 1}" for number in range(rules))
    return f'start: a0\n{links}\na{rules}: "x"'


def _number(rng: Random) -> dict[str, Any]:
    one, other = rng.choice(NUMBERS), rng.choice(NUMBERS)
    return rng.choice(
        (
            {"const": one},
            {"enum": [one, other]},
            {"type": "integer", "minimum": one, "maximum": other},
            {"type": "number", "exclusiveMinimum": one, "multipleOf": other},
            {"allOf": [{"type": "integer"}, {"enum": [one]}]},
        )
    )


def _pattern(rng: Random) -> dict[str, Any]:
    return {"type": "string", "pattern": regex(rng), "maxLength": rng.choice((0, 5, 10**9))}


def _all_of(rng: Random) -> dict[str, Any]:
    count = rng.choice((2, 5, 20, 200)) if rng.random() < 0.2 else rng.choice((2, 3))
    return {"allOf": [{"type": "string", "pattern": f"^.*{rng.choice('ab')}.*{number}$"} for number in range(count)]}


def _references(rng: Random) -> dict[str, Any]:
    loop = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    tree = {"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"}
    elsewhere = {"$ref": rng.choice(("file:///etc/passwd", "http://127.0.0.1:1/x", "#/nothing", "#", "", "a#b#c"))}
    return rng.choice((loop, tree, elsewhere))


def _nested(rng: Random) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "boolean"}
    for _ in range(rng.choice((3, 30, 90, 400))):
        deeper = ({"type": "array", "items": schema}, {"properties": {"a": schema}}, {"anyOf": [schema, {}]})
        schema = rng.choice(deeper)
    return schema


def _wide(rng: Random) -> dict[str, Any]:
    count = rng.choice((10, 100, 2_000))
    return rng.choice(
        (
            {"enum": [f"word {number}" for number in range(count)]},
            {"type": "object", "properties": {f"p{number}": {"type": "null"} for number in range(count)}},
            {"oneOf": [{"const": number} for number in range(count)]},
        )
    )


def _lengths(rng: Random) -> dict[str, Any]:
    low, high = sorted((rng.choice((0, 1, 1_000, 10**6, 2**31)), rng.choice((0, 1, 1_000, 10**6, 2**63))))
    return rng.choice(
        (
            {"type": "string", "minLength": low, "maxLength": high},
            {"type": "array", "items": {"type": "integer"}, "minItems": low, "maxItems": high, "uniqueItems": True},
            {"type": "object", "minProperties": low, "maxProperties": high},
        )
    )


def _odd(rng: Random) -> Any:
    return rng.choice(
        (
            True,
            False,
            {"type": "nothing"},
            {"type": ["string", "null", 3]},
            {"properties": []},
            {"not": {}},
            {"if": {"const": 1}, "then": False},
            {"patternProperties": {"(a+)+": {"type": "null"}}},
            {"format": "ipv9", "type": "string"},
            {"format": "regex", "type": "string"},
            {"\x00": "\ud7ff"},
        )
    )


def _object(rng: Random) -> dict[str, Any]:
    """Return an ordinary schema, so that sound ones are checked beside hostile ones."""
    leaves: list[dict[str, Any]] = [{"type": name} for name in ("string", "integer", "boolean")] + [
        {"enum": ["a", "b"]}
    ]
    properties = {name: rng.choice(leaves) for name in rng.sample("abcdef", rng.randint(1, 4))}
    return {"type": "object", "properties": properties, "required": list(properties)[:2], "additionalProperties": False}
