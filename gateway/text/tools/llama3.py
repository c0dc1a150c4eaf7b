"""Dialect of Llama 3: {"name": ..., "parameters": ...} as the whole answer; several are separated by semicolons."""

from __future__ import annotations

from gateway.text.marks import MOST_WHITE
from gateway.text.tools.calls import CallReader, ObjectCall
from gateway.text.tools.dialect import Place, SplitText, ToolSchemas
from gateway.text.tools.frame import CallFrame, json_body

SEPARATORS = "; \t\r\n"


class Llama3:
    marks = closings = hidden = ()
    frame = CallFrame(json_body('{"name": "', '", "parameters": ', "}"), separator="; ", text=r"\s*([^\s{](.|\n)*)?")

    def __init__(self, template: str = "") -> None:
        pass

    @staticmethod
    def is_in(template: str) -> bool:
        return '"parameters"' in template and "ipython" in template

    def split(self, known: str, place: Place) -> SplitText:
        if place.spoken:
            return SplitText(known, "")
        begin = known.lstrip(SEPARATORS if place.called else None)
        if not begin:
            return SplitText("", known) if len(known) <= MOST_WHITE else SplitText(known, "")
        return SplitText("", begin, known[: -len(begin)]) if begin[0] == "{" else SplitText(known, "")

    def reader(self, index: int, tools: ToolSchemas, *, inside: bool) -> CallReader:
        return ObjectCall(index, tools)
