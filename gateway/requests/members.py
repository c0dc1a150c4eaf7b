"""The members of virtual models: what a tenant may use, and runs of single members on the way of every request."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, suppress
from functools import partial

from msgspec import Struct

from engine.core.messages.requests import Lane
from gateway.core.errors import ApiError
from gateway.core.routing import ModelQuery
from gateway.core.tenants import Principal, Tenant
from gateway.requests.backend import ORDINARY, Backend, RunTerms
from gateway.requests.engine_backend import EngineBackends
from gateway.requests.path import RequestPath
from gateway.requests.record import RequestRecord
from gateway.requests.types import GenerateRequest, Generation
from gateway.requests.upstreams import UpstreamBackends


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


class Members:
    """Base models, adapters and upstreams that serve the virtual models of one gateway."""

    def __init__(self, path: RequestPath, engines: EngineBackends, upstreams: UpstreamBackends) -> None:
        self.path = path
        self.models = engines.models
        self.upstreams = upstreams
        self._engines = engines

    def new_run(
        self,
        principal: Principal,
        request: GenerateRequest,
        member: str,
        reason: str,
        terms: RunTerms = ORDINARY,
        *,
        started: float | None = None,
        permitted: Tenant | None = None,
        for_policy: bool = False,
    ) -> MemberRun:
        """Return a run with a new record. `started` is when the caller's request arrived, on the gateway's clock, from
        which its deadline counts; None means now. `permitted` is the tenant whose permissions apply; None means the
        principal's. What a key may name concerns the virtual model alone."""
        record = self.path.new_record(principal, request, started)
        record.served.member, record.served.member_reason = member, reason
        if not terms.is_charged:
            record.bill.waive()
        return MemberRun(member, reason, (permitted or principal.tenant).whole, record, terms, for_policy)

    def serve(
        self, principal: Principal, request: GenerateRequest, run: MemberRun
    ) -> AbstractAsyncContextManager[Generation]:
        """Run a request with the member of a new run; see `RequestPath.serve`."""
        lane = principal.tenant.effective_lane(request.urgency.lane)
        return self.path.serve(principal, request, run.record, partial(self._backend, run, lane), run.terms)

    def may_use(self, tenant: Tenant, member: str, lane: Lane) -> bool:
        """Return whether a tenant's requests in a lane may be served by a member, whatever their key may name."""
        tenant = tenant.whole
        if member in self.upstreams:
            return self.upstreams[member].permits(tenant, lane)
        with suppress(ApiError):
            self.models.resolve(tenant, ModelQuery(member))
            return True
        return False

    def home(self, member: str) -> str | None:
        """Return the name of the base model of a member; an empty one stands for all upstreams. None means that there
        is none now."""
        if member in self.upstreams:
            return ""
        found = self.models.find(member)
        return None if found is None else found[0].name

    def served_name(self, member: str) -> str:
        """Return the name under which a member's usage is counted: that of its adapter or base model, or its
        own as an upstream."""
        found = None if member in self.upstreams else self.models.find(member)
        if found is None:
            return member
        model, adapter = found
        return adapter or model.name

    def computed_by(self, member: str) -> str:
        """Return a key for comparing members' vectors, which are comparable if the keys are equal: it is the same for
        upstreams with the same model; other members have their own names."""
        return f"upstream {self.upstreams[member].model}" if member in self.upstreams else member

    def _backend(self, run: MemberRun, lane: Lane) -> Backend:
        if run.member in self.upstreams:
            return self.upstreams.member(run.member, run.permitted, lane)
        if run.for_policy:
            return self._engines.member(run.member)
        return self._engines.named(run.permitted, ModelQuery(run.member))
