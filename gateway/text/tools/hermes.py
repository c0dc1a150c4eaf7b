"""Dialect of Hermes, Qwen 2.5 and 3: <tool_call>{"name": ..., "arguments": ...}</tool_call> anywhere in a text."""

from __future__ import annotations

from gateway.text.tools.calls import CallReader, ObjectCall
from gateway.text.tools.dialect import Place, SplitText, ToolSchemas, split_at_marks
from gateway.text.tools.frame import CallFrame, json_body


class Hermes:
    OPENING, CLOSING = "<tool_call>", "</tool_call>"
    marks = (OPENING, CLOSING)
    closings = (CLOSING,)
    hidden = ()
    frame = CallFrame(
        json_body('{"name": "', '", "arguments": ', "}"),
        mark=OPENING,
        opening="\n",
        end="\n" + CLOSING,
        gap="\n",
        marks=marks,
    )

    def __init__(self, template: str = "") -> None:
        pass

    @staticmethod
    def is_in(template: str) -> bool:
        return Hermes.OPENING in template

    def split(self, known: str, place: Place) -> SplitText:
        return split_at_marks(known, (self.OPENING,), (self.CLOSING,) if place.called else ())

    def reader(self, index: int, tools: ToolSchemas, *, inside: bool) -> CallReader:
        return ObjectCall(index)
