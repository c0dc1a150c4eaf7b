"""Schemas that Zod and Pydantic write, in keywords that llguidance does not follow as they stand."""

import json
from collections.abc import Mapping

import pytest
from fakes import tiny_tokenizer

from engine.core.messages.grammar import Grammar, GrammarKind
from engine.grammar_check.json_schema import FOLLOWED, FREE, PATTERNS, followable
from engine.grammar_check.source import objection
from tests.grammar_walk import follows, walk
from tests.schemas import check

BYTES = tiny_tokenizer()._backend
SHORT = {"type": "string", "maxLength": 3}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 9}
UUID = "0B8e0ee4-52a8-4c11-9c0a-0d8ee1a4b6f1"


def grammar(schema):
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def record(names, **others):
    return {"type": "object", "propertyNames": names, "additionalProperties": NUMBER, **others}


def text(**keywords):
    return {"type": "string", **keywords}


CASES: Mapping[str, tuple[dict, list, list]] = {
    "z.record": (record({"type": "string"}), [{}, {"any": 1}], [{"any": "x"}]),
    "z.record of an enum": (
        record({"type": "string", "enum": ["a", "b"]}, required=["a", "b"]),
        [{"a": 1, "b": 2}],
        [{"a": 1}, {"a": 1, "b": 2, "c": 3}],
    ),
    "z.record of literals": (
        record({"anyOf": [{"type": "string", "const": "a"}, {"const": "b"}]}),
        [{}, {"b": 2}],
        [{"c": 3}],
    ),
    "z.record of short names": (
        record({"type": "string", "minLength": 2, "maxLength": 3}),
        [{"ab": 1}, {'"\\n': 1}],
        [{"a": 1}, {"abcd": 1}],
    ),
    "z.record of a pattern": (record({"type": "string", "pattern": "^k[0-9]$"}), [{"k1": 1}], [{"k": 1}, {"xk1": 1}]),
    "a pattern within": (record({"pattern": "k"}), [{"xkx": 1}], [{"x": 1}]),
    "dict of UUIDs": (record({"format": "uuid"}), [{UUID: 1}], [{"x": 1}]),
    "names beside properties": (
        {"properties": {"a": SHORT, "z": SHORT}, "propertyNames": {"enum": ["a", "b"]}, "type": "object"},
        [{"a": "x", "b": [1]}],
        [{"a": 1}, {"z": "x"}],
    ),
    "names of closed properties": (
        record({"enum": ["a", "b"]}, properties={"a": SHORT}, additionalProperties=False),
        [{"a": "x"}],
        [{"b": 1}],
    ),
    "startsWith": (text(format="starts_with", pattern="^a\\.b.*"), ["a.b", "a.bc"], ["ab", "xa.b"]),
    "both ends": (
        text(format="ends_with", allOf=[{"pattern": "^a.*"}, {"pattern": ".*b$"}], maxLength=4),
        ["ab", "axb"],
        ["a", "xb"],
    ),
    "base64": (text(format="base64", contentEncoding="base64"), ["", "QQ==", "QUJD"], ["Q", "QQ=", "QQ"]),
    "base64 of Zod": (
        text(format="base64", pattern="^$|^([0-9a-zA-Z+/]{4})*([0-9a-zA-Z+/]{2}==)?$", maxLength=8),
        ["", "QQ=="],
        ["Q"],
    ),
    "base64url": (text(format="base64url"), ["", "QQ", "Q_-D"], ["QQ==", "Q"]),
    "UUID4": (text(format="uuid4"), [UUID], [UUID.replace("-4", "-1"), "x"]),
    "SecretStr": (text(format="password", maxLength=3), ["abc"], ["abcd"]),
    "deep inside": ({"$defs": {"a": record({})}, "items": {"$ref": "#/$defs/a"}, "type": "array"}, [[{"x": 1}]], [[1]]),
}


@pytest.mark.parametrize("name", CASES)
def test_what_generators_write_is_followed(name):
    schema, good, bad = CASES[name]
    assert objection(grammar(schema)) == ""
    assert followable(followable(schema)) == followable(schema)
    for value, expected in [(value, True) for value in good] + [(value, False) for value in bad]:
        assert follows(grammar(schema), BYTES, json.dumps(value)) == expected, value
    if "maxLength" in schema or "propertyNames" in schema:
        for seed in range(3):
            check(walk(grammar(schema), BYTES, seed, most=2000), schema)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (text(format="jwt"), "format"),
        (text(format="starts_with"), "format"),
        (record({"format": "date"}), "propertyNames"),
        (record({"type": "integer"}), "propertyNames"),
        (record({"pattern": "^a", "maxLength": 3}), "propertyNames"),
        (record({"pattern": "^a"}, properties={"b": SHORT}), "propertyNames"),
        (record({"enum": ["a"]}, patternProperties={"^a": SHORT}), "propertyNames"),
        (record({"enum": [1]}), "propertyNames"),
        (record(False), "propertyNames"),
        (record({"anyOf": "a"}), "propertyNames"),
        (record({"not": {"const": "a"}}), "propertyNames"),
        (
            record({"enum": [f"a{n}" for n in range(300)]}, additionalProperties={"description": "x" * 4000}),
            "written out",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_said_otherwise_is_refused_by_name(schema, why):
    assert why in objection(grammar(schema))


def test_the_library_follows_the_formats_that_it_is_left():
    assert [name for name in sorted(FOLLOWED) if objection(grammar(text(format=name)))] == []
    assert FOLLOWED.isdisjoint(FREE | PATTERNS.keys())
    for schema in ({"enum": [{"format": "x", "propertyNames": 1}]}, {"properties": {"format": {"const": "x"}}}):
        assert followable(schema) == schema
