"""What the API's document says of one operation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec import Struct

from gateway.core.errors import Fault

BODY = frozenset({Fault.INVALID_JSON, Fault.INVALID_REQUEST, Fault.REQUEST_TOO_LARGE})
KEYED = frozenset({Fault.INVALID_API_KEY, Fault.FORBIDDEN})

TEXT = "text/plain"
"""Of an answer that is no JSON."""


@dataclass(frozen=True, slots=True)
class Operation:
    """Every one may also answer 500 `internal_error`."""

    method: str
    path: str
    """As its route spells it."""
    summary: str
    who: Literal["anyone", "tenant", "admin"]
    answer: type[Struct] | str
    """A body, or the media type of a text."""
    body: type[Struct] | None = None
    faults: frozenset[Fault] = frozenset()
    """Beside those that everyone has who authenticates or sends a body."""
    events: type[Struct] | None = None
    """Data of the events of a stream, where a request can ask for one."""
    other: Mapping[int, type[Struct]] = field(default_factory=dict)
    """Answers with another status that are no errors."""
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Parameters and their schemas."""
    status: int = 200
    """Of the answer."""
    body_type: str = "application/json"
    """Media type of the body."""
    text: str = ""
    """Media type of the same as text, where a request can ask for it."""

    @property
    def all_faults(self) -> frozenset[Fault]:
        known = frozenset[Fault]() if self.who == "anyone" else KEYED
        return self.faults | known | (BODY if self.body else frozenset()) | {Fault.INTERNAL}


def admin(method: str, path: str, summary: str, answer: Any, faults: frozenset[Fault], **more: Any) -> Operation:
    return Operation(method, path, summary, "admin", answer, faults=faults, **more)
