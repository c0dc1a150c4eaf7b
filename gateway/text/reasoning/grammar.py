"""Builds grammars, in Lark notation, of answers that begin with reasoning, which no grammar restricts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import msgspec

from engine.core.grammars import Grammar, GrammarKind
from engine.grammar_check.source import inline_regex, inline_schema
from gateway.text.reasoning.parser import Thinking

TokenOf = Callable[[str], int | None]
"""Function that returns the id of the single token that equals a text; None means that there is no such token."""

REPLY = "reply"
"""Rule of what comes after the reasoning."""


def whole_grammar(reply: Sequence[str], thinking: Thinking | None, token_of: TokenOf) -> Grammar:
    """Return the grammar of an answer whose text follows the rule `reply`.

    Args:
        reply: lines that define the rule and those that it needs.
        thinking: how the answer begins. None means that it has no reasoning.
        token_of: returns the id of the model's token for a mark, if it has one.
    """
    lines = ["%llguidance {}", *_start(thinking, token_of), *reply]
    return Grammar(GrammarKind.CONTEXT_FREE, "\n".join(lines) + "\n")


def after_reasoning(grammar: Grammar, thinking: Thinking, token_of: TokenOf) -> Grammar:
    """Return the grammar of an answer whose text follows `grammar`, a valid JSON schema or regular expression, after
    its reasoning."""
    is_schema = grammar.kind is GrammarKind.JSON_SCHEMA
    term = inline_schema(msgspec.json.decode(grammar.text)) if is_schema else inline_regex(grammar.text)
    return whole_grammar([f"{REPLY}: {term}"], thinking, token_of)


def mark_term(mark: str, token_of: TokenOf) -> str:
    """Return the grammar term for a mark: the model's token for it if there is one, else its text."""
    token = token_of(mark)
    return text_term(mark) if token is None else f"<[{token}]>"


def text_term(text: str) -> str:
    return json.dumps(text) if text else ""


def _start(thinking: Thinking | None, token_of: TokenOf) -> list[str]:
    """Return the lines of how an answer begins. The closing mark is accepted as its own token and spelled out."""
    if thinking is None:
        return [f"start: {REPLY}"]
    opening, closing = thinking.marks.opening, thinking.marks.closing
    begins = "thought" if thinking.begun else f"({mark_term(opening, token_of)} thought)?"
    token = token_of(closing)
    return [
        f"start: {begins} {REPLY}",
        f"thought: {'spelled_thought' if token is None else f'(spelled_thought | THOUGHT <[{token}]>)'} GAP",
        f"spelled_thought[lazy]: THOUGHT {text_term(closing)}",
        r"THOUGHT: /(.|\n)*/",
        r"GAP: /[ \t\r\n]{0,4}/",
    ]
