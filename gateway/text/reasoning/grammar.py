"""Builds grammars, in Lark notation, of answers that begin with reasoning. The reasoning itself may be any text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

import msgspec

from engine.core.messages.grammar import Grammar, GrammarKind
from engine.grammar_check.source import inline_regex, inline_schema
from gateway.text.reasoning import harmony
from gateway.text.reasoning.parser import Thinking

TokenOf = Callable[[str], int | None]
"""Function that returns the id of the single token that equals a text; None means that there is no such token."""

REPLY = "reply"
"""Name of the grammar rule for what comes after the reasoning."""


def whole_grammar(reply: Sequence[str], thinking: Thinking | None, token_of: TokenOf) -> Grammar:
    """Return the grammar of a whole answer: reasoning, if `thinking` says so, and then text of the rule `reply`, given
    as the lines that define it. `token_of` returns the id of a mark's token, if there is one."""
    lines = ["%llguidance {}", *_start(thinking, token_of), *reply]
    return Grammar(GrammarKind.CONTEXT_FREE, "\n".join(lines) + "\n")


def after_reasoning(grammar: Grammar, thinking: Thinking, token_of: TokenOf) -> Grammar:
    """Return the grammar of an answer that begins with reasoning and whose text after it conforms to `grammar`, a valid
    JSON schema or regular expression."""
    is_schema = grammar.kind is GrammarKind.JSON_SCHEMA
    term = inline_schema(msgspec.json.decode(grammar.text)) if is_schema else inline_regex(grammar.text)
    opening = ""
    if thinking.marks.in_channels and not thinking.begun:
        opening = marked_terms(harmony.FINAL_OPENING, harmony.MARKS, token_of)
    return whole_grammar([f"{REPLY}: {opening} {term}"], thinking, token_of)


def mark_term(mark: str, token_of: TokenOf) -> str:
    """Return the grammar term for a mark: the model's token for it if there is one, else its text."""
    token = token_of(mark)
    return text_term(mark) if token is None else f"<[{token}]>"


def marked_terms(text: str, marks: Sequence[str], token_of: TokenOf) -> str:
    """Return the grammar terms for a text: each of the `marks` in it is the model's token for that mark, if there is
    one."""
    if not marks:
        return text_term(text)
    parts = re.split(f"({'|'.join(map(re.escape, marks))})", text)
    return " ".join(mark_term(part, token_of) if part in marks else text_term(part) for part in parts)


def text_term(text: str) -> str:
    return json.dumps(text) if text else ""


def _start(thinking: Thinking | None, token_of: TokenOf) -> list[str]:
    """Return the grammar lines of the rule `start`: reasoning, if any, and then `REPLY`. The mark that closes the
    reasoning is accepted both as the model's token and spelled out in other tokens."""
    if thinking is None or (thinking.marks.in_channels and thinking.begun):
        return [f"start: {REPLY}"]
    if thinking.marks.in_channels:
        return _messages(token_of)
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


def _messages(token_of: TokenOf) -> list[str]:
    """Return the grammar lines of an answer in Harmony: messages of reasoning, or of text before tool calls, and then
    `REPLY`."""
    channel, message, start = (mark_term(mark, token_of) for mark in (harmony.CHANNEL, harmony.MESSAGE, harmony.START))
    token = token_of(harmony.END)
    return [
        f"start: message* {REPLY}",
        f'message: {channel} ("{harmony.ANALYSIS}" | "commentary") {message} content {start} "{harmony.ASSISTANT}"',
        f"content: {'spelled_content' if token is None else f'CONTENT <[{token}]>'}",
        f"spelled_content[lazy]: CONTENT {text_term(harmony.END)}",
        r"CONTENT: /(.|\n)*/",
    ]
