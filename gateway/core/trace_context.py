"""Identity of a request: its id, the route that it called, and the trace that it belongs to (W3C Trace Context)."""

from __future__ import annotations

import random
import re

from msgspec import Struct

TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
"""Groups: version, trace id, span id, flags."""
SAMPLED = 0x01


class TraceContext(Struct, frozen=True):
    """The caller's span, which becomes the parent of the gateway's span."""

    trace_id: str
    """32 hex digits."""
    span_id: str
    """16 hex digits."""
    sampled: bool


class Ingress(Struct, frozen=True):
    """How a request reached the gateway: by which route, and in which trace of the caller."""

    route: str = ""
    """The called path of the HTTP API, or the gRPC method with its service."""
    trace: TraceContext | None = None
    """The caller's trace. None means that the caller sent none."""
    session: str = ""
    """The session that the caller named in `x-session-id`: its requests go to the same engine. Empty means none."""

    @property
    def trace_id(self) -> str:
        """Id of the caller's trace; empty if there is none."""
        return self.trace.trace_id if self.trace else ""


UNKNOWN = Ingress()


def trace_context_from(traceparent: str) -> TraceContext | None:
    """Parse the value of a traceparent header. Returns None if it is empty or not valid according to the specification.

    A later version may have more fields after the flags. Version ff and ids that are all zeros are not valid.
    """
    found = TRACEPARENT.match(traceparent)
    if not found:
        return None
    version, trace_id, span_id, flags = found.groups()
    rest = traceparent[found.end() :]
    if version == "ff" or not (int(trace_id, 16) and int(span_id, 16)):
        return None
    if rest and (version == "00" or not rest.startswith("-")):
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & SAMPLED))


SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def request_id_from(asked: str) -> str:
    """Return the request id `asked` for by the caller if it is safe in headers and logs (1 to 128 letters, digits and
    `._:-`), otherwise a new id with the prefix `req-`."""
    return asked if SANE_ID.fullmatch(asked) else f"req-{new_id()}"


def session_from(asked: str) -> str:
    """Return the session that a caller named, if it is 1 to 128 letters, digits and `._:-`; otherwise an empty text,
    which is no session."""
    return asked if SANE_ID.fullmatch(asked) else ""


def new_id() -> str:
    """Return a unique id of 32 hex digits. It is not secret, so the operating system's slow randomness is not used."""
    return f"{random.getrandbits(128):032x}"
