"""Turns a grammar's text into llguidance's own format, and asks llguidance what is wrong with it. `objection` may crash
the process or take gigabytes: only worker processes call it with grammars of tenants."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import any_to_lark

from engine.core.messages.grammar import Grammar, GrammarKind
from engine.grammar_check.json_schema import REWRITTEN, followable

MAX_CHARACTERS = 65_536
"""Maximum length of a grammar's text in characters. Sound grammars of this length compile in 0.2 s on a slow core and
hold 7 MB. Hostile grammars of 31 characters crash the library, and others compute and allocate without end before
`LIMITS` applies; only worker processes stop those."""
MAX_TOLD = 500
"""Maximum length of an error message in characters."""
WHITESPACE = r"[\x20\x0A\x0D\x09]{0,20}"
"""Regex of the whitespace that an answer may have between two JSON tokens. It is bounded, because small models would
otherwise generate whitespace without end."""
LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=50_000,
    step_max_items=10_000,
    max_lexer_states=20_000,
    max_grammar_size=50_000,
    verbose_errors=False,
)
"""llguidance's bounds on a compiled grammar and on each step with it. The library counts work instead of time, so that
a grammar passes on every machine or on none. A mask of hostile grammars that compile (recursion over bounded
repetitions) takes at most 0.25 s, which is why slow masks are computed beside the steps, and they hold at most 40 MB.
Compiling itself is not bounded: intersections of patterns and
large `multipleOf` take seconds and gigabytes, which only the limits of a worker process stop."""


def library_source(grammar: Grammar) -> str:
    """Return a grammar's text in the format of llguidance. Raises ValueError if the text is malformed or too long."""
    if len(grammar.text) > MAX_CHARACTERS:
        raise ValueError(f"it is {len(grammar.text)} characters long, and may be {MAX_CHARACTERS}")
    return _SOURCES[grammar.kind](grammar.text)


def objection(grammar: Grammar) -> str:
    """Return llguidance's error on a grammar, checked without a model's tokens; empty if it is valid. A hostile grammar
    may crash the process or take minutes."""
    try:
        return told(LLMatcher.validate_grammar(library_source(grammar), limits=LIMITS))
    except ValueError as error:
        return str(error)


def told(error: str) -> str:
    """Return an error message of the grammar library (llguidance), as clients are told it, without its marker
    `<non-verbose/>`, cut to `MAX_TOLD` characters and `...` because it may quote the whole grammar."""
    text = error.removesuffix("<non-verbose/>").strip()
    return text if len(text) <= MAX_TOLD else f"{text[:MAX_TOLD]} ..."


def inline_schema(schema: Mapping[str, Any]) -> str:
    """Return the text `%json {...}` with which a Lark grammar includes a JSON schema, as strict as a schema by itself.
    Raises ValueError if the schema demands `uniqueItems`, RecursionError if it is nested too deeply."""
    return "%json " + json.dumps(
        {**followable(schema), "x-guidance": {"whitespace_pattern": WHITESPACE, "lenient": False}}
    )


def inline_regex(regex: str) -> str:
    """Return the literal `/.../` with which a Lark grammar includes a regular expression. The library escapes it like a
    regular expression that is a grammar of its own, so that no slash within it can end the literal."""
    (grammar,) = json.loads(LLMatcher.grammar_from_regex(regex))["grammars"]
    return str(grammar["lark_grammar"]).removeprefix("start: ")


def _json_source(schema: str) -> str:
    """Return a JSON schema in llguidance's format, set to refuse keywords that it cannot enforce. Raises ValueError if
    the text is no JSON object, is nested too deeply or demands `uniqueItems`."""
    try:
        document = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not a JSON document: {error}") from error
    if not isinstance(document, dict):
        raise ValueError("a schema must be a JSON object")
    if any(keyword in schema for keyword in REWRITTEN):
        schema = json.dumps(_followable(document))
        if len(schema) > MAX_CHARACTERS:  # a schema of property names is repeated for each of them
            raise ValueError(
                f"with its property names written out it has {len(schema)} characters, over {MAX_CHARACTERS}"
            )
    return LLMatcher.grammar_from_json_schema(
        schema, defaults={"whitespace_pattern": WHITESPACE}, overrides={"lenient": False}
    )


def _followable(document: dict[str, Any]) -> Any:
    try:
        return followable(document)
    except RecursionError as error:
        raise ValueError(str(error)) from error


def _context_free_source(text: str) -> str:
    """Convert a grammar in Lark's notation or GBNF (llama.cpp's) to llguidance's format. Raises ValueError on an
    error."""
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(text))
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(str(error)) from error


_SOURCES: Mapping[GrammarKind, Callable[[str], str]] = {
    GrammarKind.JSON_SCHEMA: _json_source,
    GrammarKind.REGEX: LLMatcher.grammar_from_regex,
    GrammarKind.CONTEXT_FREE: _context_free_source,
}
