"""Runs single lines of a batch: each is the request that its body would be over HTTP, and gets the same answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from engine.core.messages.requests import Lane
from gateway.batches.answers import LineAnswer, LineName, completed_answer, unrun_answer
from gateway.batches.lease import Lease
from gateway.core.errors import Fault, unavailable
from gateway.core.tenants import KeyHolders, KeyLapse, Principal, Tenant
from gateway.core.trace_context import Ingress
from gateway.core.usage import DeferredUsage
from gateway.embeddings.calls import PooledCall, embeddings_call
from gateway.openai.calls import CALLS, ApiCall
from gateway.requests.deadlines import TimeLimits
from gateway.requests.service import Gateway
from gateway.responses.calls import ResponseCall, stateless_call
from gateway.responses.parse import own_names
from gateway.responses.service import Responses

LineParser = Callable[[Gateway, Tenant, bytes, str, Ingress], ApiCall | ResponseCall | PooledCall]

RESPONSES = "/v1/responses"
PARSERS: Mapping[str, LineParser] = {**CALLS, RESPONSES: stateless_call, "/v1/embeddings": embeddings_call}
"""Parsers of the bodies of lines, by endpoint."""
FIELD_NAMES: Mapping[str, Callable[[], AbstractContextManager[None]]] = {RESPONSES: own_names}
"""Context managers, by endpoint, that rename the fields in errors of their block: the checks name fields as the chat
API does, and these endpoints have other names for them."""
UNHEARD_SECONDS = 5.0
"""Seconds after the claim of a shard for which an unknown API key does not count as deleted, because this gateway may
not have learned yet of a new key."""


@dataclass(frozen=True, slots=True)
class LineRunner:
    """Runs the lines of one shard in the batch lane, for the key that the batch was requested with."""

    gateway: Gateway
    holders: KeyHolders
    lease: Lease
    claimed: float
    """Time on the loop's clock at which the lease was claimed."""
    responses: Responses | None = None
    """Stores and continues responses. None means that lines that need that are refused."""

    @property
    def holder(self) -> Principal | KeyLapse:
        """The caller that the lines are charged to, as known now, or the reason why they must not run."""
        return self.holders.holder(self.lease.tenant, self.lease.batch.key_id)

    @property
    def deadline(self) -> float:
        """Time on the loop's clock at which the batch's window ends."""
        return self.claimed + self.lease.seconds_left

    @property
    def left(self) -> float:
        """Seconds left in the batch's window; negative if it is over."""
        return self.lease.seconds_left - self._age

    async def run(self, name: LineName, body: bytes, begun: Callable[[], None], deferred: DeferredUsage) -> LineAnswer:
        """Run one line and return its answer, under the ids in `name`. `begun` is called once the engine begins;
        usage goes to `deferred`. Raises ApiError, without an answer, if `Gateway.generate` does, the body is invalid or
        the key is not yet known.

        A key that was deleted or disabled gives an error answer.
        """
        principal = self._principal()
        if isinstance(principal, KeyLapse):
            return unrun_answer(name, *principal.value)
        call, endpoint = await self._parsed(principal.tenant, body, name), self.lease.batch.endpoint
        request = replace(
            call.request,
            output=replace(call.request.output, coalesce=True),
            urgency=replace(call.request.urgency, lane=Lane.BATCH),
            time_limits=TimeLimits(self.left, ignore_server_timeout=True),
            deferred=deferred,
        )
        call = replace(call, request=request)
        with FIELD_NAMES.get(endpoint, nullcontext)():
            async with self.gateway.generate(principal, request, begun) as generation:
                answer, usage = await call.whole(generation)
        return completed_answer(name, answer, usage, deferred)

    async def _parsed(self, tenant: Tenant, body: bytes, name: LineName) -> ApiCall | ResponseCall | PooledCall:
        endpoint = self.lease.batch.endpoint
        if endpoint == RESPONSES and self.responses is not None:
            return await self.responses.call(self.gateway, tenant, body, name.request_id, Ingress(endpoint))
        parse = partial(PARSERS[endpoint], self.gateway, tenant, body, name.request_id, Ingress(endpoint))
        return await self.gateway.parsing.run(tenant.name, len(body), parse)

    @property
    def _age(self) -> float:
        return asyncio.get_running_loop().time() - self.claimed

    def _principal(self) -> Principal | KeyLapse:
        """Return the caller that the lines are charged to, or the reason why they must not run. Raises ApiError
        (REGISTRY_UNAVAILABLE) in the first UNHEARD_SECONDS after the claim if the key is unknown."""
        holder = self.holder
        if isinstance(holder, KeyLapse) and not holder.is_certain and self._age < UNHEARD_SECONDS:
            raise unavailable(Fault.REGISTRY_UNAVAILABLE, "the key is not known here yet")
        return holder
