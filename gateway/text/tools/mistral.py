"""Dialect of Mistral: [TOOL_CALLS][{"name": ..., "arguments": ...}, ...], or [TOOL_CALLS]name[ARGS]{...} for each call,
which tokenizers of version 11 and later have."""

from __future__ import annotations

import re

from engine.grammar_check.source import inline_schema
from gateway.text.marks import MOST_WHITE
from gateway.text.tools.calls import CallReader, ObjectCall
from gateway.text.tools.dialect import Place, SplitText, ToolSchemas, split_at_marks
from gateway.text.tools.frame import Body, CallFrame, Json, Rules, json_body
from gateway.text.tools.named import NamedCall

CALLS, CALL_ID, ARGS = MARKS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
HEAD = re.compile(r"\s*(?P<name>[\w.-]+)\s*(\[CALL_ID\]\s*\w*\s*)?(\[ARGS\]\s*)?")
"""Matches the text before the arguments in the newer form. In version 11 it has the id of the call, and may lack
[ARGS]."""

LIST, LIST_BEGUN = re.compile(r"\s{0,128}\[(?=\s{0,128}\{)"), re.compile(r"\s*(\[\s*)?")


def _with_id(name: str, schema: Json, rules: Rules) -> str:
    """`Body` of the newer form with ids: returns the grammar expression for name[CALL_ID]id[ARGS]{...}."""
    return f"{rules.text(name + CALL_ID)} /[a-zA-Z0-9]{{9}}/ {rules.text(ARGS)} {inline_schema(schema)}"


class Mistral:
    marks = hidden = MARKS
    closings = (CALL_ID, ARGS)

    def __init__(self, template: str = "") -> None:
        if ARGS in template:
            body: Body = _with_id if CALL_ID in template else json_body("", ARGS)
            self.frame = CallFrame(body, mark=CALLS, gap="", marks=MARKS)
        else:
            body = json_body('{"name": "', '", "arguments": ', "}")
            space = " " if CALLS + " [" in template else ""
            self.frame = CallFrame(body, mark=CALLS, opening=space + "[", separator=", ", end="]", marks=MARKS)

    @staticmethod
    def is_in(template: str) -> bool:
        return CALLS in template

    def split(self, known: str, place: Place) -> SplitText:
        if place.inside:
            return self._inside(known, place)
        split = split_at_marks(known, (CALLS,), (CALL_ID, ARGS))
        if split.opening is None:
            return split
        if LIST_BEGUN.fullmatch(split.rest) and len(split.rest) <= MOST_WHITE:
            return SplitText(split.text, split.opening + split.rest)
        if not (begun := LIST.match(split.rest)):
            return split
        return SplitText(split.text, split.rest[begun.end() :], split.opening + begun[0], inside=True)

    def _inside(self, known: str, place: Place) -> SplitText:
        """Split the text after a call in a list of calls: a comma leads to the next call, and `]` ends the list."""
        begin = known.lstrip()
        if not begin and len(known) <= MOST_WHITE:
            return SplitText("", known, inside=True)
        if begin.startswith(","):
            return SplitText("", begin[1:], known[: len(known) - len(begin) + 1], inside=True)
        return self.split(begin[1:] if begin.startswith("]") else known, place._replace(inside=False))

    def reader(self, index: int, tools: ToolSchemas, *, inside: bool) -> CallReader:
        return ObjectCall(index) if inside else NamedCall(index, HEAD)
