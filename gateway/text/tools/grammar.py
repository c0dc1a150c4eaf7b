"""Builds grammars, in Lark notation, that restrict the tool calls in answers to the format of a dialect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.core.messages.grammar import Grammar
from engine.grammar_check.json_schema import followable
from engine.grammar_check.source import inline_schema
from gateway.text.chat_template import ToolSchema, parameters_of
from gateway.text.reasoning.grammar import REPLY, TokenOf, text_term, whole_grammar
from gateway.text.reasoning.parser import Thinking
from gateway.text.tools.frame import CallFrame, Rules
from gateway.text.tools.rule import ToolRule
from gateway.text.tools.schemas import Schema

Json = dict[str, Any]

ANY_OBJECT: Json = {"type": "object"}
LISTING = frozenset(("type", "properties", "required"))
"""Keywords of a schema that only lists an object's properties."""
ANY_TEXT = r"/(.|\n)*/"


def arguments_schema(tool: ToolSchema, rule: ToolRule) -> Json:
    """Return the JSON schema of the arguments of a call: the tool's own if the rule binds it, else any object. One that
    lists properties and says nothing of others allows no others."""
    if not rule.binds(tool["function"]["name"]):
        return ANY_OBJECT
    schema = {**ANY_OBJECT, **parameters_of(tool)}
    return {**schema, "additionalProperties": False} if _lists_all(Schema(schema, schema)) else schema


def _lists_all(schema: Schema) -> bool:
    """Return whether a schema lists properties, all required ones among them, and has no keyword that could allow
    others."""
    properties, required = schema.body.get("properties"), schema.body.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return False  # the check of the grammar refuses other types
    return schema.keywords <= LISTING and all(name in properties for name in map(str, required))


def tool_grammar(
    frame: CallFrame,
    tools: Sequence[ToolSchema],
    rule: ToolRule,
    token_of: TokenOf,
    answer: Json | None = None,
    thinking: Thinking | None = None,
) -> Grammar:
    """Build the grammar of answers that may or must call `tools` by `rule`, with `thinking` before if given. Raises
    UnwritableTool if a tool's schema cannot be followed in this format.

    Args:
        frame: format of a tool call, with a mark if there is an `answer`.
        token_of: returns the id of a mark's token, if it has one.
        answer: schema of an answer without tool calls. None means any text.
    """
    rules = Rules(frame.marks, token_of)
    bodies = [
        _body(frame, number, tool, rule, rules)
        for number, tool in enumerate(tools)
        if rule.allows(tool["function"]["name"])
    ]
    rules.lines.append(f"call: {' | '.join(bodies)}")
    rules.lines.append(f"calls: {_section(frame, rule, rules)}")
    return whole_grammar([*_reply(frame, rule, rules, answer), *rules.lines], thinking, token_of)


class UnwritableTool(ValueError):
    """The schema of a tool's arguments cannot be followed in the format in which the model writes tool calls."""

    def __init__(self, number: int, problem: str) -> None:
        """`number` is the tool's place among the offered tools, from 0."""
        super().__init__(problem)
        self.number = number


def _body(frame: CallFrame, number: int, tool: ToolSchema, rule: ToolRule, rules: Rules) -> str:
    """Add the rule of a tool's calls, and return its name. Raises UnwritableTool."""
    try:
        return rules.add(frame.body(tool["function"]["name"], followable(arguments_schema(tool, rule)), rules))
    except (ValueError, RecursionError) as error:
        raise UnwritableTool(number, str(error)) from error


def _section(frame: CallFrame, rule: ToolRule, rules: Rules) -> str:
    """Return the grammar expression for a section of tool calls, without the mark that begins the section."""
    several = rule.several and frame.separator is not None
    more = f"({rules.text(frame.separator or '')} call)*" if several else ""
    return " ".join(filter(None, [rules.text(frame.opening), "call", more, rules.text(frame.end)]))


def _reply(frame: CallFrame, rule: ToolRule, rules: Rules, answer: Json | None) -> list[str]:
    """Return the grammar lines of the rule `REPLY` and of the rules that it needs: tool calls or, unless they are
    required, also an answer without calls, which is text or follows the schema `answer`."""
    section = f"{rules.text(frame.mark)} calls"
    several = rule.several and frame.gap is not None
    required = f"{section} ({rules.text(frame.gap or '')} {section})*" if several else section
    if rule.must_call:
        return [f"{REPLY}: {required}"]
    opening = rules.text(frame.answer_opening)
    if answer is not None:
        return [f"{REPLY}: {required} | answer", f"answer: {opening} {inline_schema(answer)}"]
    if opening:
        return [f"{REPLY}: {required} | {opening} TEXT", f"TEXT: {ANY_TEXT}"]
    if not frame.mark:
        return [f"{REPLY}: {required} | TEXT", f"TEXT: /{frame.text}/"]
    return _among_text(frame, rule, rules.token_of)


def _among_text(frame: CallFrame, rule: ToolRule, token_of: TokenOf) -> list[str]:
    """Return the grammar lines of the rule `REPLY` for free text with sections of tool calls, each of which begins with
    the frame's mark, as its own token or spelled out in others."""
    token = token_of(frame.mark)
    marked = "spelled" if token is None else f"(spelled | TEXT <[{token}]>)"
    return [
        f"{REPLY}: section* TEXT" if rule.several else f"{REPLY}: section | TEXT",
        f"section: {marked} calls",
        f"spelled[lazy]: TEXT {text_term(frame.mark)}",
        f"TEXT: {ANY_TEXT}",
    ]
