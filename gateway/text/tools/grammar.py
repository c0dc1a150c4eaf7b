"""Builds grammars, in Lark notation, that restrict the tool calls in answers to the format of a dialect."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from engine.core.grammars import Grammar
from engine.grammar_check.source import inline_schema
from gateway.text.reasoning.grammar import REPLY, TokenOf, mark_term, text_term, whole_grammar
from gateway.text.reasoning.parser import Thinking
from gateway.text.tokenizer import ToolSchema
from gateway.text.tools.dialects import CallFrame
from gateway.text.tools.rule import ToolRule

Json = dict[str, Any]

ANY_OBJECT: Json = {"type": "object"}
ANY_TEXT = r"/(.|\n)*/"
NO_OBJECT = r"/\s*([^\s{](.|\n)*)?/"
"""Regular expression of a text that is not parsed as a tool call, because it does not begin with a JSON object."""


def arguments_schema(tool: ToolSchema, rule: ToolRule) -> Json:
    """Return the JSON schema that the arguments of a call of this tool must follow: the tool's own schema if the rule
    binds the tool, otherwise that of any object."""
    function = tool["function"]
    return {**ANY_OBJECT, **function["parameters"]} if rule.binds(function["name"]) else ANY_OBJECT


def tool_grammar(
    frame: CallFrame,
    tools: Sequence[ToolSchema],
    rule: ToolRule,
    token_of: TokenOf,
    answer: Json | None = None,
    thinking: Thinking | None = None,
) -> Grammar:
    """Build the grammar of answers that may or must call tools.

    Args:
        frame: format of a tool call; it must have a mark if there is an `answer`.
        tools: the offered tools.
        rule: which tools may be called, whether one must be, how often, and whose schemas are binding.
        token_of: returns the id of the model's token for a mark, if it has one.
        answer: the schema of an answer that makes no tool call. None means that such an answer may be any text that is
            not parsed as a tool call.
        thinking: how the answer begins. None means that it has no reasoning.
    """
    callable_tools = [tool for tool in tools if rule.allows(tool["function"]["name"])]
    lines = _reply(frame, rule, token_of, answer)
    options = [f"tool_{number}" for number in range(len(callable_tools))]
    parts = [text_term(frame.padding), f"({' | '.join(options)})", text_term(frame.padding)]
    parts.append(mark_term(frame.end, token_of))
    lines.append("body: " + " ".join(filter(None, parts)))
    lines += [f"{option}: {_call(frame, tool, rule)}" for option, tool in zip(options, callable_tools, strict=True)]
    return whole_grammar(lines, thinking, token_of)


def _reply(frame: CallFrame, rule: ToolRule, token_of: TokenOf, answer: Json | None) -> list[str]:
    calls = f"call ({text_term(frame.separator)} call)*" if rule.several else "call"
    lines = [f"call: {mark_term(frame.mark, token_of)} body"]
    if rule.must_call:
        return [f"{REPLY}: {calls}", *lines]
    if answer is not None:
        return [f"{REPLY}: {calls} | answer", *lines, f"answer: {inline_schema(answer)}"]
    if not frame.mark:
        return [f"{REPLY}: {calls} | TEXT", *lines, f"TEXT: {NO_OBJECT}"]
    return _among_text(frame, rule, token_of)


def _among_text(frame: CallFrame, rule: ToolRule, token_of: TokenOf) -> list[str]:
    """Return the grammar's lines for tool calls among free text, which ends at a mark. The mark is accepted as its own
    token and spelled out: a model that has a token for it can still write it with other tokens."""
    token = token_of(frame.mark)
    marked = "spelled" if token is None else f"(spelled | TEXT <[{token}]>)"
    return [
        f"{REPLY}: call* TEXT" if rule.several else f"{REPLY}: call | TEXT",
        f"call: {marked} body",
        f"spelled[lazy]: TEXT {text_term(frame.mark)}",
        f"TEXT: {ANY_TEXT}",
    ]


def _call(frame: CallFrame, tool: ToolSchema, rule: ToolRule) -> str:
    head = f'{{"name": {json.dumps(tool["function"]["name"])}, "{frame.key}": '
    return f"{text_term(head)} {inline_schema(arguments_schema(tool, rule))} {text_term('}')}"
