"""Grammars that hold answers to calls of tools, written as a dialect writes them. In Lark's notation."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from engine.core.grammars import Grammar, GrammarKind
from engine.grammar_source import inline_schema
from gateway.tokenizer import ToolSchema
from gateway.tools.dialects import Frame
from gateway.tools.rule import ToolRule

Json = dict[str, Any]

TokenOf = Callable[[str], int | None]
"""The id of the one token that a text is; None: it is none."""

ANY_OBJECT: Json = {"type": "object"}
ANY_TEXT = r"/(.|\n)*/"
NO_OBJECT = r"/\s*([^\s{](.|\n)*)?/"
"""A text that is not read as a call."""


def arguments_schema(tool: ToolSchema, rule: ToolRule) -> Json:
    """What the arguments of a call have to follow."""
    function = tool["function"]
    return {**ANY_OBJECT, **function["parameters"]} if rule.binds(function["name"]) else ANY_OBJECT


def tool_grammar(
    frame: Frame, tools: Sequence[ToolSchema], rule: ToolRule, token_of: TokenOf, answer: Json | None = None
) -> Grammar:
    """
    Args:
        frame: needs a mark where there is an `answer`.
        answer: the schema of an answer that makes no call; None: it may be any text.
    """
    callable_tools = [tool for tool in tools if rule.allows(tool["function"]["name"])]
    lines = ["%llguidance {}", *_start(frame, rule, token_of, answer)]
    options = [f"tool_{number}" for number in range(len(callable_tools))]
    parts = [_text(frame.padding), f"({' | '.join(options)})", _text(frame.padding), _mark(frame.end, token_of)]
    lines.append("body: " + " ".join(filter(None, parts)))
    lines += [f"{option}: {_call(frame, tool, rule)}" for option, tool in zip(options, callable_tools, strict=True)]
    return Grammar(GrammarKind.CONTEXT_FREE, "\n".join(lines) + "\n")


def _start(frame: Frame, rule: ToolRule, token_of: TokenOf, answer: Json | None) -> list[str]:
    calls = f"call ({_text(frame.separator)} call)*" if rule.several else "call"
    lines = [f"call: {_mark(frame.mark, token_of)} body"]
    if rule.must_call:
        return [f"start: {calls}", *lines]
    if answer is not None:
        return [f"start: {calls} | answer", *lines, f"answer: {inline_schema(answer)}"]
    if not frame.mark:
        return [f"start: {calls} | TEXT", *lines, f"TEXT: {NO_OBJECT}"]
    return _among_text(frame, rule, token_of)


def _among_text(frame: Frame, rule: ToolRule, token_of: TokenOf) -> list[str]:
    """Text, until a mark is written; a model that has a token for it can spell it out all the same."""
    token = token_of(frame.mark)
    marked = "spelled" if token is None else f"(spelled | TEXT <[{token}]>)"
    return [
        "start: call* TEXT" if rule.several else "start: call | TEXT",
        f"call: {marked} body",
        f"spelled[lazy]: TEXT {_text(frame.mark)}",
        f"TEXT: {ANY_TEXT}",
    ]


def _call(frame: Frame, tool: ToolSchema, rule: ToolRule) -> str:
    head = f'{{"name": {json.dumps(tool["function"]["name"])}, "{frame.key}": '
    return f"{_text(head)} {inline_schema(arguments_schema(tool, rule))} {_text('}')}"


def _mark(mark: str, token_of: TokenOf) -> str:
    """As the model writes it: with its own token, if it has one."""
    token = token_of(mark)
    return _text(mark) if token is None else f"<[{token}]>"


def _text(text: str) -> str:
    return json.dumps(text) if text else ""
