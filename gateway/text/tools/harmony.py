"""Dialect of gpt-oss: a message to `functions.NAME`, whose content is a JSON object. `HarmonyParser` has dropped the
marks of all other messages when this dialect reads the text. A call ends the answer."""

from __future__ import annotations

import re

from gateway.text.reasoning.harmony import CALL, CALL_OPENING, CONSTRAIN, END, FINAL_OPENING, MARKS, MESSAGE
from gateway.text.tools.calls import CallReader
from gateway.text.tools.dialect import Place, SplitText, ToolSchemas, split_at_marks
from gateway.text.tools.frame import CallFrame, json_body
from gateway.text.tools.named import NamedCall

HEAD = re.compile(rf"(functions\.)?(?P<name>[\w.-]+)\s*({re.escape(CONSTRAIN)}\s*)?(json\s*)?{re.escape(MESSAGE)}\s*")


class Harmony:
    marks = hidden = MARKS
    closings = (CALL, END)
    frame = CallFrame(
        json_body("", f" {CONSTRAIN}json{MESSAGE}"),
        mark=f"{CALL_OPENING}functions.",
        answer_opening=FINAL_OPENING,
        marks=MARKS,
    )

    def __init__(self, template: str = "") -> None:
        pass

    @staticmethod
    def is_in(template: str) -> bool:
        return CALL_OPENING in template or FINAL_OPENING in template

    def split(self, known: str, place: Place) -> SplitText:
        return split_at_marks(known, (CALL_OPENING,), self.closings)

    def reader(self, index: int, tools: ToolSchemas, *, inside: bool) -> CallReader:
        return NamedCall(index, HEAD, CALL)
