"""One operation of the HTTP API as data: what its route, its description and its method of the client are made from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar, overload

from msgspec import Struct

from gateway.core.administrators import AdminRole
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
TENANTS_KEY = KEYED | {Fault.KEY_EXPIRED, Fault.ADDRESS_NOT_ALLOWED}
"""Errors of every operation with a key, and with a tenant's."""
ADMINISTERED = frozenset({Fault.INVALID_REQUEST, Fault.PERMISSION_DENIED})
"""Errors of every operation of administrators, and `RECORDED` of those that change something."""
RECORDED = frozenset({Fault.AUDIT_UNAVAILABLE})

TEXT = "text/plain"
"""Media type of responses that are plain text instead of JSON."""


PLACEHOLDER = re.compile(r"\{(\w+)(?::\w+)?\}")
"""A part of a path that stands for a name, as in `{id}` or, if the name may have slashes, `{name:path}`."""

VERBS = {"GET": "read", "POST": "create", "PATCH": "change", "DELETE": "delete"}
"""What a method does to the object that its path names."""

A = TypeVar("A", bound=Struct)


@dataclass(frozen=True, slots=True, eq=False)
class Operation(Generic[A]):
    """One operation of the HTTP API: a method on a path. Every operation may also return 500 `internal_error`."""

    method: str
    path: str
    """The path as in its route."""
    summary: str
    who: Literal["anyone", "tenant", "admin"]
    """The callers that may use the operation."""
    answer: type[A] | str
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
    body_is_optional: bool = False
    """True means that an absent body is read as an object without fields."""
    role: AdminRole = AdminRole.OWNER
    """Role that an administrator needs."""
    of_tenant: bool = False
    """True means that the administrators of a tenant may call the operation, for that tenant."""

    @property
    def is_change(self) -> bool:
        """Return whether the operation of administrators changes something, so that it is recorded."""
        return self.method != "GET"

    @property
    def noun(self) -> str:
        """The kind of object that an operation of administrators is about, as its path names it: `tenants`."""
        parts = self.path.split("/")
        return parts[3] if len(parts) > 3 else "adapters"

    @property
    def action(self) -> str:
        """Name of the change in the audit log: the noun, and the path's last word or what its method means."""
        last = self.path.rsplit("/", 1)[-1]
        is_verb = last != self.noun and not PLACEHOLDER.fullmatch(last)
        return f"{self.noun}.{last if is_verb else VERBS[self.method]}"

    @property
    def kind(self) -> type[A]:
        """Return the struct of the response's body. The response must be JSON."""
        assert not isinstance(self.answer, str), f"{self.path} answers with {self.answer}"
        return self.answer

    @property
    def is_limited(self) -> bool:
        """Return whether the tenant's limits apply, so that lanes, time limits and rate headers do, too."""
        return Fault.LANE_QUEUE_FULL in self.faults

    @property
    def all_faults(self) -> frozenset[Fault]:
        """All errors that the operation may return, including INTERNAL and those of authentication, of its body and,
        for tenants, of a gateway that drains. An administrator's operation refuses unknown query parameters and, if it
        is a change, unknown fields of its body, even if it takes none."""
        known = {"anyone": frozenset[Fault](), "admin": KEYED, "tenant": TENANTS_KEY}[self.who]
        is_admin = self.who == "admin"
        checked = BODY if self.body or (is_admin and self.is_change) else frozenset()
        administered = ADMINISTERED | (RECORDED if self.is_change else set()) if is_admin else frozenset()
        drained = {Fault.ENGINE_UNAVAILABLE} if self.who == "tenant" else set()
        return self.faults | known | checked | administered | drained | {Fault.INTERNAL}


@overload
def admin(
    method: str, path: str, summary: str, answer: type[A], faults: frozenset[Fault], **more: Any
) -> Operation[A]: ...


@overload
def admin(method: str, path: str, summary: str, answer: str, faults: frozenset[Fault], **more: Any) -> Operation: ...


def admin(method: str, path: str, summary: str, answer: Any, faults: frozenset[Fault], **more: Any) -> Operation[Any]:
    """Return an operation that only administrators may call. One that reads needs the role `viewer` unless `role` says
    otherwise; one that changes something names its `role`. Raises ValueError if it does not."""
    if "role" not in more and method != "GET":
        raise ValueError(f"{method} {path} must name the role that it needs")
    return Operation(method, path, summary, "admin", answer, faults=faults, **{"role": AdminRole.VIEWER, **more})
