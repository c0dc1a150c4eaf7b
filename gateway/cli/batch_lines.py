"""Checks a batch's input file before it is uploaded, so that errors of form are reported within a second."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Literal

import msgspec

LONGEST_LINE = 64 * 2**20
"""Maximum bytes read at once: more than gateways are configured to accept in a line, and little memory."""
BOM = b"\xef\xbb\xbf"
"""UTF-8 byte order mark, with which some editors begin a file."""
MOST_TOLD = 10
"""Number of invalid lines after which the check stops."""


class Body(msgspec.Struct):
    model: str
    stream: bool | None = None


class InputLine(msgspec.Struct):
    """The fields of a line that can be checked without a gateway."""

    custom_id: str
    method: Literal["POST"]
    url: str
    body: Body


class LinesError(ValueError):
    """The gateway would refuse the file: the message says that it is empty, or has one line for each of the first
    MOST_TOLD invalid lines."""


@dataclass(frozen=True, slots=True)
class CheckedInput:
    lines: int
    endpoint: str
    """The endpoint that all lines name as `url`."""


def check_input(file: BinaryIO) -> CheckedInput:
    """Check the lines of a batch input file (JSON with the fields of InputLine, unique custom_ids, one endpoint, no
    streaming), and return their number and the endpoint. Raises LinesError for invalid lines or an empty file."""
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
    return CheckedInput(len(seen), endpoint)


def _numbered(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield the number, from 1, and the text of each line that is not blank, without a byte order mark. A line over
    LONGEST_LINE bytes is yielded in parts, which are not valid JSON."""
    for number, text in enumerate(iter(lambda: file.readline(LONGEST_LINE), b""), 1):
        line = text.removeprefix(BOM) if number == 1 else text
        if line.strip():
            yield number, line


def _read(text: bytes) -> tuple[str, InputLine | None]:
    try:
        return "", msgspec.json.decode(text, type=InputLine)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        return str(error), None


def _conflict(line: InputLine, seen: dict[str, int], endpoint: str) -> str:
    """Return an error message if a line repeats the custom_id of an earlier line (`seen`: custom_id -> line number),
    has another endpoint or asks for streaming, otherwise an empty string."""
    if line.custom_id in seen:
        return f"custom_id {line.custom_id!r} is that of line {seen[line.custom_id]}, too"
    if line.url != endpoint:
        return f"url is {line.url!r}, and {endpoint!r} before it: a file is for one endpoint"
    return "body.stream: a batch line cannot be streamed" if line.body.stream else ""
