"""One run of a member of a virtual model, as the route runner asks `Gateway.serve` for it."""

from __future__ import annotations

from msgspec import Struct

from gateway.core.tenants import Tenant
from gateway.requests.record import RequestRecord


class MemberRun(Struct):
    """Which member serves a request for a virtual model, and how the run differs from that of an ordinary request."""

    member: str
    reason: str
    """Why this member serves the request, in one word."""
    started: float
    """When the caller's request arrived, in seconds on the gateway's clock. Its deadline counts from then on."""
    engine_wait: float | None = None
    """Seconds that the run waits for an engine before its first token. None means as long as other requests."""
    reserved_runs: int = 1
    """Number of runs to reserve tokens for: this one and those that may follow it, each as large as this one, so that
    they fit the limits."""
    is_counted: bool = False
    """True means that this run does not count in the requests per minute of the caller's tenant and key, because an
    earlier one does."""
    suspect: bool = False
    """True means that an engine process of an earlier run of the caller's request ended while it had the request, which
    may have made it crash."""
    is_charged: bool = True
    """False means that the run is a shadow copy, which no tenant asked for: it is not limited, charged or counted in
    usage."""
    permitted: Tenant | None = None
    """Tenant whose permissions apply. None means that of the principal."""
    for_policy: bool = False
    """True means that the policy needs the run to decide, such as a verifier's. The operator chose its member, which
    the tenant need not be permitted to name; but an upstream gets only data that may leave for it."""
    record: RequestRecord | None = None
    """Record of the run, once it has begun."""
