"""What a caller wants its answer to match, in every spelling that is accepted, as one grammar."""

from __future__ import annotations

import json
from dataclasses import dataclass

import msgspec

from engine.core.grammars import Grammar, GrammarKind
from gateway.core.errors import invalid_request, unsupported_parameter
from gateway.openai_schema import ResponseFormat, StructuredOutputs

ANY_OBJECT = '{"type":"object"}'
KINDS = ("json", "regex", "choice", "grammar", "json_object")
NOT_SUPPORTED = ("structural_tag", "disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar, and the field of the request that asks for it; neither where the answer is free."""

    grammar: Grammar | None = None
    field: str | None = None


def constraint(response_format: ResponseFormat | None, structured: StructuredOutputs | None) -> Constraint:
    """Whether the grammar is one is for the engine to say. Raises ApiError: INVALID_REQUEST, UNSUPPORTED_PARAMETER."""
    by_format = _by_format(response_format) if response_format else Constraint()
    by_kind = _by_kind(structured) if structured else Constraint()
    if by_format.grammar and by_kind.grammar:
        raise invalid_request("structured_outputs and response_format exclude each other", "structured_outputs")
    return by_kind if by_kind.grammar else by_format


def _by_format(wanted: ResponseFormat) -> Constraint:
    match wanted.type:
        case "text":
            return Constraint()
        case "json_object":
            return Constraint(Grammar(GrammarKind.JSON_SCHEMA, ANY_OBJECT), "response_format")
        case "json_schema":
            if wanted.json_schema is None:
                raise invalid_request("response_format.json_schema is required", "response_format.json_schema")
            return Constraint(_schema(wanted.json_schema.schema), "response_format.json_schema.schema")
    raise unsupported_parameter("response_format.type", f"{wanted.type!r} is not supported")


def _by_kind(wanted: StructuredOutputs) -> Constraint:
    for name in NOT_SUPPORTED:
        if getattr(wanted, name):
            raise unsupported_parameter(f"structured_outputs.{name}")
    given = [name for name in KINDS if getattr(wanted, name) not in (None, False)]
    if len(given) != 1:
        raise invalid_request(f"structured_outputs needs one of {', '.join(KINDS)}", "structured_outputs")
    return Constraint(_grammar(wanted), f"structured_outputs.{given[0]}")


def _grammar(wanted: StructuredOutputs) -> Grammar:
    if wanted.json is not None:
        return _schema(wanted.json)
    if wanted.regex is not None:
        return Grammar(GrammarKind.REGEX, wanted.regex)
    if wanted.grammar is not None:
        return Grammar(GrammarKind.CONTEXT_FREE, wanted.grammar)
    if wanted.choice is not None:
        return _one_of(wanted.choice)
    return Grammar(GrammarKind.JSON_SCHEMA, ANY_OBJECT)


def _schema(schema: object) -> Grammar:
    """In the order it was written in: that of the answer's properties."""
    text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
    return Grammar(GrammarKind.JSON_SCHEMA, text)


def _one_of(choices: list[str]) -> Grammar:
    if not choices:
        raise invalid_request("structured_outputs.choice must not be empty", "structured_outputs.choice")
    return Grammar(GrammarKind.CONTEXT_FREE, "start: " + " | ".join(map(json.dumps, choices)))
