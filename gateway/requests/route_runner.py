"""Runs requests for virtual models: takes the steps that the policy plans, until a member answers."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from types import MappingProxyType

import structlog
from msgspec import Struct
from msgspec.structs import replace

from engine.core.messages.requests import Lane
from gateway.core.billing import BillingConfig
from gateway.core.errors import ApiError, model_not_found, unsupported_parameter
from gateway.core.tenants import COPIES_TENANT, Principal, Tenant
from gateway.core.trace_context import new_id
from gateway.requests.deadlines import earliest
from gateway.requests.member_run import MemberRun
from gateway.requests.members import Members
from gateway.requests.prompt_features import prompt_facts, prompt_vector
from gateway.requests.route_outcome import RouteOutcome, outcome_of
from gateway.requests.route_steps import StepsRun
from gateway.requests.terms import RunTerms
from gateway.requests.types import Chat, GenerateRequest, Generation
from gateway.requests.upstreams import Upstream
from gateway.virtual_models.policies import members_of_batches
from gateway.virtual_models.policy import Asked, MemberState, Policy, Vector

COPIES = Principal(COPIES_TENANT, "")

log = structlog.get_logger("routes")


class RouteTable(Struct, frozen=True):
    """The virtual models of a gateway."""

    policies: Mapping[str, Policy]
    """Policies by the names of the virtual models."""
    state: Callable[[str], MemberState] = lambda member: MemberState()
    """Returns the present state of a member that an engine serves."""
    upstreams: Mapping[str, Upstream] = MappingProxyType({})
    billing: BillingConfig = BillingConfig()
    """Prices, from which costs are computed."""
    observe: Callable[[RouteOutcome], None] = lambda outcome: None
    """Called with the outcome at the end of each request for a virtual model, and of each shadow copy of one."""


class RouteRunner:
    """Answers the requests for virtual models, for one gateway."""

    def __init__(
        self,
        members: Members,
        table: RouteTable,
        request_timeout: float | None,
    ) -> None:
        """`request_timeout` is that of `ServiceSettings`."""
        self._members = members
        self._table = table
        self._timeout = request_timeout
        self._copies: set[asyncio.Task[None]] = set()
        self._copying: Counter[str] = Counter()
        """Number of running shadow copies of requests, by virtual model."""

    def __contains__(self, model: str) -> bool:
        """Return whether there is a virtual model of this name."""
        return model in self._table.policies

    @property
    def names(self) -> Collection[str]:
        """The names of the virtual models."""
        return self._table.policies.keys()

    def batch_homes(self, model: str, tenant: Tenant | None) -> Sequence[str]:
        """Return the names of the base models that may answer batch requests for a virtual model, in the order of the
        policy's members; an empty name stands for all upstreams. Members that do not exist and those that the tenant
        may not use are left out. None stands for any tenant."""
        members = members_of_batches(self._table.policies[model])
        usable = [one for one in members if tenant is None or self._members.may_use(tenant, one, Lane.BATCH)]
        homes = map(self._members.home, usable)
        return [home for home in dict.fromkeys(homes) if home is not None]

    @asynccontextmanager
    async def generate(
        self, principal: Principal, request: GenerateRequest, begun: Callable[[], None]
    ) -> AsyncIterator[Generation]:
        """Run a request for a virtual model like `Gateway.generate`, and report its outcome at the end. Raises the
        error of the last member that was tried, and ApiError: MODEL_NOT_FOUND, the tenant may not use the virtual model
        or any of its members; UNSUPPORTED_PARAMETER, the request is for vectors."""
        policy, started = self._table.policies[request.model.model], self._members.path.clock()
        with self._members.path.arriving(request.request_id, request.ingress) as arrival:
            arrival.identify(principal)
            runs: list[MemberRun] = []
            asked = self._asked(policy, principal, request, runs)
            try:
                steps = await policy.plan(asked) if asked.members else ()
            except BaseException:  # such as the caller's leaving
                self._observe(policy, runs, None, asked.lane, request.model.model)
                raise
            if not steps:
                raise model_not_found(request.model.model)
        if not request.ignore_server_timeout:
            request = replace(request, deadline=earliest(request.deadline, self._timeout))
        steps_run = StepsRun(self._members, principal, request, started, runs, begun)
        try:
            async with AsyncExitStack() as stack:
                generation = await steps_run.begin(stack, steps)
                if not steps_run.doubts:  # only now: what limits refuse is not copied, nor what may crash engines
                    self._copy(policy, principal, request, asked)
                yield generation
        finally:
            self._observe(policy, steps_run.runs, steps_run.answering, asked.lane, request.model.model)

    async def close(self) -> None:
        """Cancel the shadow copies of requests that still run, and wait until they have ended."""
        while self._copies:
            for task in self._copies:
                task.cancel()
            await asyncio.wait(self._copies)

    def _asked(self, policy: Policy, principal: Principal, request: GenerateRequest, runs: list[MemberRun]) -> Asked:
        """Return the request as the policy sees it. Runs that the policy needs to decide, for vectors of the prompt,
        are added to `runs`."""

        async def vector(member: str, pooling: str) -> Vector:
            terms = RunTerms(engine_wait=0.0, is_counted=any(run.record.is_granted for run in runs))
            run = self._members.new_run(principal, request, member, "vector", terms, for_policy=True)
            runs.append(run)
            return await prompt_vector(self._members, principal, request, run, pooling)

        self._members.models.resolve(principal.tenant, request.model)  # raises if the tenant may not use it
        if request.pooling is not None and len(set(map(self._members.computed_by, policy.members))) > 1:
            raise unsupported_parameter("model", "names a virtual model, whose members' vectors cannot be compared")
        lane = principal.tenant.effective_lane(request.lane)
        return Asked(
            tenant=principal.tenant.name,
            lane=lane,
            session=conversation(request),
            request=new_id(),
            members=[member for member in policy.members if self._members.may_use(principal.tenant, member, lane)],
            state=partial(self._state, principal.tenant),
            facts=partial(prompt_facts, request),
            vector=vector,
        )

    def _state(self, tenant: Tenant, member: str) -> MemberState:
        if member in self._members.upstreams:
            return MemberState(ready=self._members.upstreams[member].is_ready(tenant))
        return self._table.state(member)

    def _copy(self, policy: Policy, principal: Principal, request: GenerateRequest, asked: Asked) -> None:
        """Start a copy of a request, whose answer is discarded, with the member that shadows the virtual model, if the
        policy's `shadow` selects the request and fewer than its `at_once` copies run."""
        shadow, name = policy.shadow, request.model.model
        if shadow is None or not shadow.copies(asked) or self._copying[name] >= shadow.at_once:
            return
        if not self._members.may_use(principal.tenant, shadow.member, Lane.BATCH):
            return
        copied = replace(request, lane=Lane.BATCH, request_class="", coalesce=True, stall=None)
        copied = replace(copied, deadline=self._timeout)
        terms, permitted = RunTerms(is_charged=False), principal.tenant
        run = self._members.new_run(COPIES, copied, shadow.member, "shadow", terms, permitted=permitted)
        task = asyncio.create_task(self._run_copy(copied, run), name="shadow")
        self._copies.add(task)
        self._copying[name] += 1
        task.add_done_callback(self._copies.discard)
        task.add_done_callback(lambda _: self._copying.subtract((name,)))

    async def _run_copy(self, request: GenerateRequest, run: MemberRun) -> None:
        try:
            async with self._members.serve(COPIES, request, run) as generation:
                async for _ in generation:
                    pass
        except ApiError as error:
            log.info("shadow_failed", model=request.model.model, member=run.member, reason=error.reason)
        except Exception:
            log.exception("shadow_failed", model=request.model.model, member=run.member)
        finally:
            self._table.observe(outcome_of(request.model.model, [run], run))

    def _observe(
        self, policy: Policy, runs: Sequence[MemberRun], answering: MemberRun | None, lane: Lane, name: str
    ) -> None:
        """Report how a request for a virtual model ended. `runs` are all runs; `answering` that of the member that
        answered, None if none did."""
        served = list(map(self._members.served_name, policy.members))
        self._table.observe(outcome_of(name, runs, answering, self._table.billing, served, lane))


def conversation(request: GenerateRequest) -> str:
    """Return a text that is equal in all requests of one conversation: the session that the caller named, or a hash of
    the prompt up to the first user message, which later turns repeat."""
    if request.ingress.session:
        return request.ingress.session
    prompt = request.prompts[0] if request.prompts else ""
    if isinstance(prompt, Chat):
        begin = next((at for at, said in enumerate(prompt.messages, 1) if said.get("role") == "user"), 1)
        prompt = str([(said.get("role"), said.get("content")) for said in prompt.messages[:begin]])
    return hashlib.blake2b(str(prompt).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
