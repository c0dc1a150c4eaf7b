"""Lines of output and error files, as OpenAI has them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.batches.record import Outcome, Tally
from gateway.core.errors import ApiError
from gateway.generation import Usage
from gateway.openai.render import encode_json

ENDINGS = OUTPUT, ERRORS = ".out", ".err"
"""How names of parts end, by the file that they become a piece of."""
NEVER_RUN: Mapping[Outcome, tuple[str, str]] = {
    "cancelled": ("batch_cancelled", "the batch was cancelled before this line was answered"),
    "expired": ("batch_expired", "the batch's completion window was over before this line was answered"),
}
"""By what became of the batch: code and message for lines without an answer."""

ESCAPED = {character.encode(): f"\\u{ord(character):04x}".encode() for character in "\x85\u2028\u2029"}
"""JSON need not escape them, but they end a line to Python's splitlines, which many a script reads such a file with."""


@dataclass(frozen=True, slots=True)
class LineName:
    """Which line an answer is to."""

    batch_id: str
    number: int
    """In the input file, from 1."""
    custom_id: str

    @property
    def answer_id(self) -> str:
        """The same whoever answers, however often: a file written twice is one file."""
        digest = hashlib.blake2b(self.request_id.encode(), digest_size=12)
        return f"batch_req_{digest.hexdigest()}"

    @property
    def request_id(self) -> str:
        """By which logs speak of it."""
        return f"{self.batch_id}.{self.number}"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a line has come to, to be written down."""

    text: bytes
    """With the end of the line."""
    usage: Usage | None = None
    """None: it failed, and goes to the error file."""

    @property
    def ending(self) -> str:
        return ERRORS if self.usage is None else OUTPUT

    @property
    def tally(self) -> Tally:
        if self.usage is None:
            return Tally(failed=1)
        used = self.usage
        return Tally(1, 0, used.prompt, used.cached, used.completion, used.device_us)


def answered(name: LineName, body: Any, usage: Usage) -> Answer:
    return Answer(_line(name, response=_response(name, 200, body)), usage)


def refused(name: LineName, error: ApiError) -> Answer:
    """One that was sent, and came to nothing."""
    return Answer(_line(name, response=_response(name, error.http_status, error.body())))


def never_run(name: LineName, code: str, message: str) -> Answer:
    return Answer(_line(name, error={"code": code, "message": message}))


def _response(name: LineName, status: int, body: Any) -> dict[str, Any]:
    return {"status_code": status, "request_id": name.request_id, "body": body}


def _line(name: LineName, response: Any = None, error: Any = None) -> bytes:
    text = encode_json({"id": name.answer_id, "custom_id": name.custom_id, "response": response, "error": error})
    for character, escaped in ESCAPED.items():
        text = text.replace(character, escaped)
    return text + b"\n"
