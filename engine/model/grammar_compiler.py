"""From a grammar's text to a matcher of the model's tokens, with llguidance; in bounded work and memory."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from engine.core.grammars import Grammar, GrammarKind

MAX_CHARACTERS = 65_536
"""Of a grammar's text. Measured on a slow core: so many compile in 0.25 s at worst."""
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


class Compiler:
    """Thread-safe.

    Args:
        folder: of the model. Its tokenizer.json is read when the first grammar comes.
        vocab_size: columns of the logits.
        eos_token_ids: what ends an answer where its grammar lets it.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._file = folder / "tokenizer.json"
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None

    def compile(self, grammar: Grammar) -> LLMatcher:
        """A matcher that has seen no token: copies of it, cheap to make, follow sequences.

        Raises:
            ValueError: it is no such grammar, uses what is not supported, or is too much; the message says which.
        """
        if len(grammar.text) > MAX_CHARACTERS:
            raise ValueError(f"it is {len(grammar.text)} characters long, and may be {MAX_CHARACTERS}")
        source = _SOURCES[grammar.kind](grammar.text)
        matcher = LLMatcher(self._load_tokenizer(), source, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the dearest one, which builds what the others use: here, not in a step
        if matcher.is_error():
            raise ValueError(reason(matcher))
        return matcher

    def _load_tokenizer(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                if not (self._file.is_file() and self._eos_token_ids):
                    raise ValueError("this model has no tokenizer.json or no EOS token, which following one needs")
                eos = list(self._eos_token_ids)
                self._tokenizer = LLTokenizer(self._file.read_text(), n_vocab=self._vocab_size, eos_token=eos)
            return self._tokenizer


def reason(matcher: LLMatcher) -> str:
    """Why a matcher gave up, in the library's words."""
    return matcher.get_error().removesuffix("<non-verbose/>").strip()


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
