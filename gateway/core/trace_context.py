"""Where a request came from: what it called, and the trace it belongs to (W3C Trace Context)."""

from __future__ import annotations

import re

from msgspec import Struct

TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
"""Version, trace id, span id, flags."""
SAMPLED = 0x01


class TraceContext(Struct, frozen=True):
    """The caller's span, which ours will be a child of."""

    trace_id: str
    """32 hex digits."""
    span_id: str
    """16 hex digits."""
    sampled: bool


class Ingress(Struct, frozen=True):
    """How a request reached us."""

    route: str = ""
    """What was called: a path of the HTTP API, or a gRPC method with its service."""
    trace: TraceContext | None = None
    """None: the caller told of no trace."""

    @property
    def trace_id(self) -> str:
        """The caller's; empty: there is none."""
        return self.trace.trace_id if self.trace else ""


UNKNOWN = Ingress()


def trace_context_from(traceparent: str) -> TraceContext | None:
    """The header's value, understood; None where it is absent or not valid, as the specification has it.

    A later version may go on after the flags; version ff is forbidden, and so are ids of zeros.
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
