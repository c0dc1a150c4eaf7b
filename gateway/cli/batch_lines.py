"""A look at a batch's file before it is sent: what would be refused for its form alone, found in a second."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Literal

import msgspec

LONGEST_LINE = 64 * 2**20
"""Bytes: longer than any gateway is told to take, and short beside a terminal's memory."""
BOM = b"\xef\xbb\xbf"
"""With which some editors begin a file."""
MOST_TOLD = 10
"""Lines that are wrong, before nobody reads on."""


class Body(msgspec.Struct):
    model: str
    stream: bool | None = None


class Line(msgspec.Struct):
    """What of a line can be judged without a gateway."""

    custom_id: str
    method: Literal["POST"]
    url: str
    body: Body


class LinesError(ValueError):
    """A file that would be refused; the message has a line for each of the first few that are wrong."""


@dataclass(frozen=True, slots=True)
class Looked:
    lines: int
    endpoint: str
    """That all of them name."""


def look(file: BinaryIO) -> Looked:
    """Reads a file to its end, a line at a time. Raises LinesError."""
    seen: dict[str, int] = {}
    endpoint = ""
    wrong: list[str] = []
    for number, text in _numbered(file):
        why, line = _read(text)
        if line is not None:
            endpoint = endpoint or line.url
            why = _conflict(line, seen, endpoint)
            seen.setdefault(line.custom_id, number)
        if why:
            wrong.append(f"line {number}: {why}")
        if len(wrong) == MOST_TOLD:
            break
    if wrong:
        raise LinesError("\n".join(wrong))
    if not seen:
        raise LinesError("there is no line in it")
    return Looked(len(seen), endpoint)


def _numbered(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Lines from 1 on; one that is too long comes in parts, and ends the walk as no JSON."""
    for number, text in enumerate(iter(lambda: file.readline(LONGEST_LINE), b""), 1):
        line = text.removeprefix(BOM) if number == 1 else text
        if line.strip():
            yield number, line


def _read(text: bytes) -> tuple[str, Line | None]:
    try:
        return "", msgspec.json.decode(text, type=Line)
    except msgspec.DecodeError as error:
        return str(error), None


def _conflict(line: Line, seen: dict[str, int], endpoint: str) -> str:
    """With the lines before it, or with what a batch can be; empty: none."""
    if line.custom_id in seen:
        return f"custom_id {line.custom_id!r} is that of line {seen[line.custom_id]}, too"
    if line.url != endpoint:
        return f"url is {line.url!r}, and {endpoint!r} before it: a file is for one endpoint"
    return "body.stream: a batch line cannot be streamed" if line.body.stream else ""
