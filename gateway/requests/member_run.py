"""One run of a member of a virtual model."""

from __future__ import annotations

from msgspec import Struct

from gateway.core.tenants import Tenant
from gateway.requests.backend import ORDINARY, RunTerms
from gateway.requests.record import RequestRecord


class MemberRun(Struct):
    """Which member serves a request for a virtual model, why, and on which terms."""

    member: str
    reason: str
    """Why this member serves the request, in one word."""
    permitted: Tenant
    """Tenant whose permissions apply: the caller's, also for a shadow copy, which runs for no tenant."""
    record: RequestRecord
    terms: RunTerms = ORDINARY
    for_policy: bool = False
    """True means that the policy needs the run to decide, such as a verifier's. The operator chose its member, which
    the tenant need not be permitted to name; but an upstream gets only data that may leave for it."""
