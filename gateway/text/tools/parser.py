"""Separates tool calls from text in an answer that comes in pieces."""

from __future__ import annotations

from gateway.text.tools.calls import CallReader, ToolCallPart
from gateway.text.tools.dialect import Dialect, Place, ToolSchemas, without

Part = str | ToolCallPart

MOST_AT_ONCE = 4096
"""Maximum number of characters that are parsed together. After each mark, the rest of them is copied, which would take
time that grows with the square of a long piece's length."""


class ToolParser:
    """Parses one answer, which comes in pieces, to parts: texts and parts of tool calls. White space around tool calls
    is dropped; what only looked like a tool call becomes text."""

    def __init__(self, dialect: Dialect, tools: ToolSchemas) -> None:
        self._dialect = dialect
        self._tools = tools
        self._held = ""
        """Text that may turn out to begin a tool call, or the tool call so far while it may turn out to be text."""
        self._reader: CallReader | None = None
        self._spoken = False
        self._after_call = False
        self._inside = False
        """True means that a list of calls is open."""
        self.num_calls = 0

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        for start in range(0, len(text), MOST_AT_ONCE):
            piece = text[start : start + MOST_AT_ONCE]
            while piece:
                piece = self._call(piece, parts, self._reader) if self._reader else self._prose(piece, parts)
        return parts

    def flush(self) -> list[Part]:
        """Return what was held back, after the last piece of text. An incomplete end mark of a call is dropped."""
        parts: list[Part] = []
        text, self._held = self._held, ""
        if not (self._after_call and any(mark.startswith(text.strip()) for mark in self._dialect.closings)):
            self._say(without(text, self._dialect.hidden), parts)
        return parts

    def _prose(self, text: str, parts: list[Part]) -> str:
        """Parse text outside a tool call, and append what may be shown to `parts`. Return the rest from where a call
        begins, or an empty string if none begins."""
        known, self._held = self._held + text, ""
        split = self._dialect.split(known, Place(self.num_calls > 0, self._spoken, self._inside))
        self._inside = split.inside
        self._say(split.text, parts)
        if split.opening is None:
            self._held = split.rest
            return ""
        self._held, self._reader = split.opening, self._dialect.reader(self.num_calls, self._tools, inside=split.inside)
        return split.rest

    def _call(self, text: str, parts: list[Part], reader: CallReader) -> str:
        """Parse text of the tool call that `reader` reads, and append new parts. Return the text after the call, or
        from where it is not a valid call; empty while the call goes on."""
        news, rest = reader.push(text)
        parts += news
        self.num_calls = reader.index + reader.begun
        self._held = "" if reader.begun else (self._held + text).removesuffix(rest)
        if reader.ended or reader.broken:
            self._end(parts, reader)
        return rest

    def _end(self, parts: list[Part], reader: CallReader) -> None:
        self._reader = None
        self._after_call = self._after_call or reader.begun
        if not reader.ended:
            self._inside = False
        if not reader.begun:
            self._say(without(self._held, self._dialect.hidden), parts)
            self._held = ""

    def _say(self, text: str, parts: list[Part]) -> None:
        text = text.lstrip() if self._after_call else text
        if text:
            self._spoken, self._after_call = True, False
            parts.append(text)
