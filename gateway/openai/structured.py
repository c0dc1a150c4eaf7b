"""Converts every accepted way to request structured output into one grammar."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from engine.core.messages.grammar import Grammar, GrammarKind, allowed_tokens
from engine.grammar_check.source import MAX_CHARACTERS
from gateway.api_schema.chats import ResponseFormat, Shaped, StructuredOutputs
from gateway.core.errors import invalid_request, unsupported_parameter
from gateway.core.json_bounds import check_json

ANY_OBJECT = '{"type":"object"}'
GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
    "format": "json",
}
"""Fields of earlier versions of vLLM, of SGLang, llama.cpp and Ollama, with the kind of `structured_outputs` that each
stands for."""
KINDS = ("json", "regex", "choice", "grammar", "json_object")
NOT_SUPPORTED = ("structural_tag", "disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")


class Constraint(msgspec.Struct, frozen=True):
    """A grammar, and the request field that asks for it. Both are None if the answer is not constrained."""

    grammar: Grammar | None = None
    field: str | None = None


def constraint(body: Shaped, formatted: Constraint) -> Constraint:
    """Return the grammar that a request asks for with the field of its route for formats (`formatted`), with
    `structured_outputs`, with a field in GUIDED or with `allowed_token_ids`.

    Raises ApiError: INVALID_REQUEST, several ask or one is incomplete; UNSUPPORTED_PARAMETER, its kind is unsupported.
    """
    asked = [
        formatted,
        by_kind(body.structured_outputs) if body.structured_outputs else Constraint(),
        *(_guided(name, value) for name in GUIDED if (value := getattr(body, name)) not in (None, "")),
        _allowed(body.allowed_token_ids),
    ]
    found = [one for one in asked if one.grammar]
    if len(found) > 1:
        first, second = ((one.field or "").partition(".")[0] for one in found[:2])
        raise invalid_request(f"{second} and {first} exclude each other", second)
    return found[0] if found else Constraint()


def by_format(wanted: ResponseFormat | None) -> Constraint:
    """Return the grammar of `response_format`. Raises ApiError: INVALID_REQUEST, its schema is missing, given twice or
    nested too deep; UNSUPPORTED_PARAMETER, its type is unsupported."""
    if wanted is None or (wanted.type == "text" and wanted.schema is None):
        return Constraint()
    if wanted.type not in ("json_object", "json_schema"):
        kind = "response_format.schema" if wanted.type == "text" else "response_format.type"
        raise unsupported_parameter(kind, f"{wanted.type[:80]!r} is not supported")
    if wanted.schema is not None:
        if wanted.json_schema is not None:
            raise invalid_request("response_format has two schemas", "response_format.schema")
        return _of_kind("json", wanted.schema, "response_format.schema")
    if wanted.type == "json_object":
        return Constraint(Grammar(GrammarKind.JSON_SCHEMA, ANY_OBJECT), "response_format")
    if wanted.json_schema is None:
        raise invalid_request("response_format.json_schema is required", "response_format.json_schema")
    return _of_kind("json", wanted.json_schema.schema, "response_format.json_schema.schema")


def by_kind(wanted: StructuredOutputs) -> Constraint:
    """Return the grammar of `structured_outputs`. Raises ApiError: INVALID_REQUEST, it does not set exactly one kind,
    the schema is nested too deep or the choice is empty or too long; UNSUPPORTED_PARAMETER, it sets one of
    NOT_SUPPORTED."""
    for name in NOT_SUPPORTED:
        if getattr(wanted, name):
            raise unsupported_parameter(f"structured_outputs.{name}")
    given = [name for name in KINDS if getattr(wanted, name) not in (None, False)]
    if len(given) != 1:
        raise invalid_request(f"structured_outputs needs one of {', '.join(KINDS)}", "structured_outputs")
    return _of_kind(given[0], getattr(wanted, given[0]), f"structured_outputs.{given[0]}")


def _guided(name: str, value: Any) -> Constraint:
    return _of_kind("json_object" if value == "json" and name == "format" else GUIDED[name], value, name)


def _allowed(token_ids: list[int] | None) -> Constraint:
    if token_ids is None:
        return Constraint()
    field = "allowed_token_ids"
    if not token_ids:
        raise invalid_request(f"{field} must not be empty", field, "empty_array")
    grammar = allowed_tokens(token_ids)
    if len(grammar.text) > MAX_CHARACTERS:
        raise invalid_request(f"{field} has too many ids apart from each other", field, "array_above_max_length")
    return Constraint(grammar, field)


def _of_kind(kind: str, value: Any, field: str) -> Constraint:
    return Constraint(_grammar(kind, value, field), field)


def _grammar(kind: str, value: Any, field: str) -> Grammar:
    match kind:
        case "json":
            return schema_grammar(value, field)
        case "regex":
            return Grammar(GrammarKind.REGEX, value)
        case "grammar":
            return Grammar(GrammarKind.CONTEXT_FREE, value)
        case "choice":
            return _one_of(value, field)
    return Grammar(GrammarKind.JSON_SCHEMA, ANY_OBJECT)


def schema_grammar(schema: object, field: str) -> Grammar:
    """Return the grammar of a JSON schema, given decoded or as text. The order of its properties is kept, because the
    answer has its properties in this order. Raises ApiError: INVALID_REQUEST, naming `field`: the text exceeds a bound
    of `check_json`, because it is decoded later."""
    if isinstance(schema, str):
        check_json(schema.encode("utf-8", "surrogatepass"), field)
    text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
    return Grammar(GrammarKind.JSON_SCHEMA, text)


def _one_of(choices: list[str], field: str) -> Grammar:
    if not choices:
        raise invalid_request(f"{field} must not be empty", field)
    if sum(map(len, choices)) > MAX_CHARACTERS:
        raise invalid_request(f"{field} may have {MAX_CHARACTERS} characters", field)
    return Grammar(GrammarKind.CONTEXT_FREE, "start: " + " | ".join(map(json.dumps, choices)))
