"""Renders the lines of output and error files in OpenAI's format."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.batches.record import Outcome, Tally
from gateway.core.errors import ApiError
from gateway.core.usage import DeferredUsage
from gateway.openai.render import encode_json
from gateway.requests.types import TokenUsage

SUFFIXES = OUTPUT, ERRORS = ".out", ".err"
"""Suffixes of the names of objects with committed answers: those for the output file and those for the error file."""
NEVER_RUN: Mapping[Outcome, tuple[str, str]] = {
    "cancelled": ("batch_cancelled", "the batch was cancelled before this line was answered"),
    "expired": ("batch_expired", "the batch's completion window was over before this line was answered"),
}
"""Error code and message of lines without an answer, by the outcome of the batch."""

ESCAPED = {character.encode(): f"\\u{ord(character):04x}".encode() for character in "\x85\u2028\u2029"}
"""JSON escapes of characters (in UTF-8) that JSON allows unescaped, but that Python's splitlines takes as line ends.
Many scripts read result files with it."""


@dataclass(frozen=True, slots=True)
class LineName:
    """Identifies one line of a batch's input file, to which an answer belongs."""

    batch_id: str
    number: int
    """Number of the line in the input file, from 1."""
    custom_id: str

    @property
    def answer_id(self) -> str:
        """Id of the answer. It is derived from batch id and line number only, so that a rewritten file is the same."""
        digest = hashlib.blake2b(self.request_id.encode(), digest_size=12)
        return f"batch_req_{digest.hexdigest()}"

    @property
    def request_id(self) -> str:
        """Id of the line's request in logs and answers: `BATCH_ID.NUMBER`."""
        return f"{self.batch_id}.{self.number}"


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """The final result of a line as encoded JSON, for the output file, or for the error file if `usage` is None."""

    text: bytes
    """Encoded JSON line, including its newline."""
    usage: TokenUsage | None = None
    """Tokens and device time of a completed line. None means that the line failed and goes to the error file."""
    deferred: DeferredUsage = field(default_factory=DeferredUsage)
    """What the attempt that ended so has used, also if it failed. It is charged when the answer is committed."""

    @property
    def suffix(self) -> str:
        return ERRORS if self.usage is None else OUTPUT

    @property
    def tally(self) -> Tally:
        if self.usage is None:
            return Tally(failed=1)
        used = self.usage
        return Tally(1, 0, used.prompt, used.cached, used.completion, used.device_us)


def completed_answer(name: LineName, body: Any, usage: TokenUsage, deferred: DeferredUsage) -> LineAnswer:
    return LineAnswer(_line(name, response=_response(name, 200, body)), usage, deferred)


def failed_answer(name: LineName, error: ApiError, deferred: DeferredUsage) -> LineAnswer:
    """Return the answer of a line that was tried and failed, with the error as its HTTP response."""
    return LineAnswer(_line(name, response=_response(name, error.http_status, error.body())), deferred=deferred)


def unrun_answer(name: LineName, code: str, message: str) -> LineAnswer:
    return LineAnswer(_line(name, error={"code": code, "message": message}))


def _response(name: LineName, status: int, body: Any) -> dict[str, Any]:
    return {"status_code": status, "request_id": name.request_id, "body": body}


def _line(name: LineName, response: Any = None, error: Any = None) -> bytes:
    text = encode_json({"id": name.answer_id, "custom_id": name.custom_id, "response": response, "error": error})
    for character, escaped in ESCAPED.items():
        text = text.replace(character, escaped)
    return text + b"\n"
