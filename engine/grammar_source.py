"""What llguidance makes of a grammar's text, in bounded work, and what it has against it.

The gateway asks before it spends anything on a request, the engine when it prepares the grammar: both come to the same
verdict, as far as that needs no tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import any_to_lark

from engine.core.grammars import Grammar, GrammarKind

MAX_CHARACTERS = 65_536
"""Of a grammar's text. Measured on a slow core: so many compile in 0.25 s at worst."""
MAX_TOLD = 500
"""Characters of an error message."""
WHITESPACE = r"[\x20\x0A\x0D\x09]{0,20}"
"""Between the parts of a JSON document. With a bound, because small models otherwise write nothing else for ever."""
LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=50_000,
    step_max_items=10_000,
    max_lexer_states=20_000,
    max_grammar_size=50_000,
    verbose_errors=False,
)
"""The library counts work, not time, so that a grammar that passes here passes everywhere. Under these limits hostile
ones (nested repetitions, exponential automata) cost 150 ms while they are compiled, 40 ms in a step and 40 MB."""


def library_source(grammar: Grammar) -> str:
    """In the library's own format. Raises ValueError: it is no such grammar, or too long."""
    if len(grammar.text) > MAX_CHARACTERS:
        raise ValueError(f"it is {len(grammar.text)} characters long, and may be {MAX_CHARACTERS}")
    return _SOURCES[grammar.kind](grammar.text)


def objection(grammar: Grammar) -> str:
    """What is against a grammar whatever the model; empty: nothing. Costs no more than compiling it does."""
    try:
        return told(LLMatcher.validate_grammar(library_source(grammar), limits=LIMITS))
    except ValueError as error:
        return str(error)


def told(error: str) -> str:
    """Shorten an error of the library and drop what is meant for its authors. It may quote the whole grammar."""
    text = error.removesuffix("<non-verbose/>").strip()
    return text if len(text) <= MAX_TOLD else f"{text[:MAX_TOLD]} ..."


def inline_schema(schema: Mapping[str, Any]) -> str:
    """A JSON schema as a part of a grammar in Lark's notation, read as strictly as one that stands alone."""
    return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITESPACE, "lenient": False}})


def _json_source(schema: str) -> str:
    """What the library would have to leave out of account it refuses, whatever the schema itself says to that."""
    try:
        document = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not a JSON document: {error}") from error
    if not isinstance(document, dict):
        raise ValueError("a schema must be a JSON object")
    return LLMatcher.grammar_from_json_schema(
        schema, defaults={"whitespace_pattern": WHITESPACE}, overrides={"lenient": False}
    )


def _context_free_source(text: str) -> str:
    """Lark's notation, or GBNF (llama.cpp's; xgrammar's EBNF is much the same)."""
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(text))
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(str(error)) from error


_SOURCES: Mapping[GrammarKind, Callable[[str], str]] = {
    GrammarKind.JSON_SCHEMA: _json_source,
    GrammarKind.REGEX: LLMatcher.grammar_from_regex,
    GrammarKind.CONTEXT_FREE: _context_free_source,
}
