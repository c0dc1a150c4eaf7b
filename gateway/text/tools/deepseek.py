"""Dialect of DeepSeek V3, R1 and V3.1: a list of calls between marks. In V3 and R1 a call has the type `function`
before its name, and its arguments stand in a block of code."""

from __future__ import annotations

import re

from gateway.text.tools.calls import CallReader
from gateway.text.tools.dialect import Place, SplitText, ToolSchemas, split_at_marks
from gateway.text.tools.frame import CallFrame, json_body
from gateway.text.tools.named import NamedCall

CALLS, END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, END_CALL, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
MARKS = (CALLS, END_CALLS, CALL, END_CALL, SEPARATOR)
BLOCK, END_BLOCK = "```json", "\n```"
HEAD = re.compile(rf"\s*({CALL})?\s*(\w+{SEPARATOR})?(?P<name>[\w.-]+)({SEPARATOR}|\s*{BLOCK})\s*")


class DeepSeek:
    marks = hidden = MARKS
    closings = ("```" + END_CALL, END_CALL, END_CALLS)

    def __init__(self, template: str = "") -> None:
        if BLOCK in template:
            body = json_body(f"{CALL}function{SEPARATOR}", f"\n{BLOCK}\n", END_BLOCK + END_CALL)
        else:
            body = json_body(CALL, SEPARATOR, END_CALL)
        gap = "\n" if BLOCK in template else ""
        self.frame = CallFrame(body, mark=CALLS, separator=gap, end=END_CALLS, marks=MARKS)

    @staticmethod
    def is_in(template: str) -> bool:
        return CALL in template

    def split(self, known: str, place: Place) -> SplitText:
        return split_at_marks(known, (CALLS, CALL), (*self.closings, SEPARATOR))

    def reader(self, index: int, tools: ToolSchemas, *, inside: bool) -> CallReader:
        return NamedCall(index, HEAD)
