"""Description of one operation in the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec import Struct

from gateway.core.errors import Fault

BODY = frozenset(
    {
        Fault.INVALID_JSON,
        Fault.INVALID_REQUEST,
        Fault.REQUEST_TOO_LARGE,
        Fault.UNSUPPORTED_CODING,
        Fault.RATE_LIMIT_EXCEEDED,
        Fault.OVERLOADED,
    }
)
KEYED = frozenset({Fault.INVALID_API_KEY, Fault.FORBIDDEN})

TEXT = "text/plain"
"""Media type of responses that are plain text instead of JSON."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of the HTTP API: a method on a path. Every operation may also return 500 `internal_error`."""

    method: str
    path: str
    """The path as in its route."""
    summary: str
    who: Literal["anyone", "tenant", "admin"]
    """The callers that may use the operation."""
    answer: type[Struct] | str
    """Struct of the response's JSON body, or the media type of a text response."""
    body: type[Struct] | None = None
    """Struct of the request's body. None means that the operation takes no body."""
    faults: frozenset[Fault] = frozenset()
    """Errors of this operation, besides those that every operation with a key or with a body may return."""
    events: type[Struct] | None = None
    """Struct of the event data of a stream. None means that the response cannot be streamed."""
    other: Mapping[int, type[Struct]] = field(default_factory=dict)
    """Structs of responses that have another status than `status` but are not errors, by status."""
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Schemas of the query parameters, by name."""
    status: int = 200
    """Status of the successful response."""
    body_type: str = "application/json"
    """Media type of the request's body."""
    text: str = ""
    """Media type of an alternative text form of the response; empty if there is none."""

    @property
    def is_limited(self) -> bool:
        """Return whether the tenant's limits apply, so that lanes, time limits and rate headers do, too."""
        return Fault.LANE_QUEUE_FULL in self.faults

    @property
    def all_faults(self) -> frozenset[Fault]:
        """All errors that the operation may return, including INTERNAL and those of authentication and of its body. An
        administrator's operation refuses unknown query parameters and, if it is a change, unknown fields of its body,
        even if it takes none."""
        known = frozenset[Fault]() if self.who == "anyone" else KEYED
        is_admin = self.who == "admin"
        checked = BODY if self.body or (is_admin and self.method != "GET") else frozenset()
        return self.faults | known | checked | ({Fault.INVALID_REQUEST} if is_admin else set()) | {Fault.INTERNAL}


def admin(method: str, path: str, summary: str, answer: Any, faults: frozenset[Fault], **more: Any) -> Operation:
    return Operation(method, path, summary, "admin", answer, faults=faults, **more)
