"""Grammar of a call in the pythonic dialect: name(key=value, ...), with values in Python's notation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from engine.grammar_check.source import inline_schema
from gateway.text.reasoning.grammar import text_term
from gateway.text.tools.arguments import EMPTY, arguments_of, in_order
from gateway.text.tools.frame import Json, Rules
from gateway.text.tools.schemas import Schema

KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
ANY_KEY = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"
COMMA = '", "'
TEXT = r"""/"([^"\\\x00-\x1f]|\\[^\x00-\x1fuUx])*"|'([^'\\\x00-\x1f]|\\[^\x00-\x1fuUx])*'/"""
NUMBER = r"/-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,3})?/"
WORDS = {"boolean": '("True" | "False")', "null": '"None"'}


def python_call(name: str, schema: Json, rules: Rules) -> str:
    """Return the expression for a call. Arguments come in the schema's order; a schema that names none allows any.
    Raises ValueError: the schema has a keyword that no grammar of this dialect can follow."""
    arguments = arguments_of(Schema(schema, schema).resolved())
    if arguments is None:
        inside = _listed(f'{rules.once("key", lambda: ANY_KEY)} "=" {_any(rules)}', rules)
    else:
        terms = []
        for key, inner, required in arguments:
            if not KEY.fullmatch(key):
                raise ValueError(f"the name of the property {key[:80]!r} cannot be written in calls of this model")
            terms.append((f"{text_term(key + '=')} {_value(inner, rules)}", required))
        inside = in_order(terms, COMMA, rules)
    return f'{text_term(name + "(")} {inside} ")"'


def _listed(term: str, rules: Rules, least: int = 0, most: int | None = None) -> str:
    """Return the expression of a term from `least` to `most` times, with commas between. None means no limit."""
    if most == 0:
        return EMPTY
    name = rules.add(term)
    more = f"{name} ({COMMA} {name}){{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
    return f"({more})" if least else f"({more})?"


def _any(rules: Rules) -> str:
    """Return the name of the grammar rule that matches any Python literal of the dialect."""

    def expression() -> str:
        value, text = rules.once("any", expression), rules.once("text", lambda: TEXT)
        item = f'{text} ": " {value}'
        words = '"True" | "False" | "None"'
        return f'{text} | {NUMBER} | {words} | "[" {_listed(value, rules)} "]" | "{{" {_listed(item, rules)} "}}"'

    return rules.once("any", expression)


def _value(schema: Schema, rules: Rules) -> str:
    """Return the grammar expression for a value. The target of a `$ref` gets a rule of its own, so that schemas may be
    recursive."""
    reference = schema.body.get("$ref") if isinstance(schema.body, Mapping) else None
    if reference is not None:
        return rules.once(f"$ref {id(schema.root)} {reference}", lambda: _value(schema.resolved(), rules))
    options = [_exact(one, rules) for one in schema.alternatives()]
    return f"({' | '.join(options)})"


def _exact(schema: Schema, rules: Rules) -> str:
    if schema.values is not None:
        return f"({' | '.join(text_term(_literal(value)) for value in schema.values)})"
    kind = schema.body.get("type") if isinstance(schema.body, Mapping) else None
    if kind in ("string", "integer", "number"):  # Python and JSON write these alike
        return inline_schema(schema.body)
    if kind is None:
        schema.check_keywords(frozenset())
        return _any(rules)
    if kind in WORDS:
        schema.check_keywords(frozenset(("type",)))
        return WORDS[kind]
    return _list(schema, rules) if kind == "array" else _dictionary(schema, rules)


def _list(schema: Schema, rules: Rules) -> str:
    schema.check_keywords(frozenset(("type", "items", "minItems", "maxItems")))
    least, most = int(schema.body.get("minItems", 0)), schema.body.get("maxItems")
    item = _value(schema.at(schema.body.get("items", True)), rules)
    return f'"[" {_listed(item, rules, least, None if most is None else int(most))} "]"'


def _dictionary(schema: Schema, rules: Rules) -> str:
    arguments = arguments_of(schema)
    if arguments is None:
        extra = _value(schema.at(schema.body.get("additionalProperties", True)), rules)
        inside = _listed(f'{rules.once("text", lambda: TEXT)} ": " {extra}', rules)
    else:
        terms = [
            (f"{text_term(_literal(key) + ': ')} {_value(inner, rules)}", needed) for key, inner, needed in arguments
        ]
        inside = in_order(terms, COMMA, rules)
    return f'"{{" {inside} "}}"'


def _literal(value: Any) -> str:
    """Return a JSON value in Python's notation."""
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_literal(key)}: {_literal(inner)}' for key, inner in value.items())}}}"
    return json.dumps(value, ensure_ascii=False)
