"""The gateway's core: `Gateway.generate` is the path of every request, for all protocols."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import MappingProxyType

from gateway.adapters.admin import AdapterAdmin
from gateway.core.estimate import OutputAverages
from gateway.core.lifecycle import Lifecycle
from gateway.core.tenant_room import TenantRoom
from gateway.core.tenants import Principal, Tenant
from gateway.core.trace_context import Ingress
from gateway.limiter.base import Limiter
from gateway.requests.backend import Instruments, Observer
from gateway.requests.engine_backend import EngineBackends
from gateway.requests.members import Members
from gateway.requests.path import ArrivingRequest, RequestPath
from gateway.requests.record import RequestRecord
from gateway.requests.route_runner import RouteRunner, RouteTable
from gateway.requests.served_model import ServedModels
from gateway.requests.settings import ServiceSettings
from gateway.requests.turns import EncodingTurns, LoopTurns, ParsingTurns
from gateway.requests.types import GenerateRequest, Generation
from gateway.requests.upstreams import UpstreamBackends
from gateway.requests.wire_room import WireRoom

MOST_WATCHES = 128
"""Maximum number of streams, over HTTP and gRPC together, by which one tenant follows its batches and stored responses
in this process. Each reads Redis up to 10 times a second for a batch, and up to 20 times for a response, and no other
limit of the tenant applies to it."""
TOO_MANY_WATCHES = (
    "you have {held} open streams of batches and stored responses here, the maximum; close some, or get the batch or "
    "response itself from time to time"
)


class Gateway:
    """Runs each request through its stages: check and tokenize, reserve, generate, detokenize, settle.

    Even if the client, the engine or the limiter fails, every request is removed from the live table, its engine
    streams are closed, and its reservation is settled exactly once.
    """

    def __init__(
        self,
        models: ServedModels,
        adapters: AdapterAdmin,
        limiter: Limiter,
        *,
        settings: ServiceSettings | None = None,
        observers: Sequence[Observer] = (),
        clock: Callable[[], float] = time.monotonic,
        routes: RouteTable | None = None,
    ) -> None:
        """Create the gateway. It does not start or close what it is given.

        `adapters` administers the adapters of all models; `clock` returns monotonic seconds; `routes` has the virtual
        models, None means that there are none.
        """
        settings = settings or ServiceSettings()
        self.lifecycle = Lifecycle()
        """The state of this process: it serves or drains."""
        self.models = models
        self.adapters = adapters
        self.limiter = limiter
        self.turns = LoopTurns()
        instruments = Instruments(settings, observers, clock, OutputAverages())
        self._engines = EngineBackends(models, instruments, self.turns)
        self._path = RequestPath(limiter, instruments)
        self._routes: RouteRunner | None = None
        """The virtual models. None means that there are none."""
        if routes is not None:
            upstreams = UpstreamBackends(routes.upstreams, instruments, models.default.tokenizer)
            members = Members(self._path, self._engines, upstreams)
            self._routes = RouteRunner(members, routes, settings.request_timeout)
        self.encoding = EncodingTurns()
        """Turns of the requests that only count, encode or decode tokens."""
        self.parsing = ParsingTurns()
        """Runs the parsers of request bodies."""
        self.watches = TenantRoom(MOST_WATCHES, TOO_MANY_WATCHES)
        """Open streams of batches and stored responses."""
        self.wire = WireRoom()
        """Bytes of requests that arrive and of answers that leave, over all protocols."""

    @property
    def live(self) -> Mapping[str, RequestRecord]:
        """Records of the requests in progress, by their unique ids."""
        return MappingProxyType(self._path.live)

    @property
    def active(self) -> int:
        """Number of requests in progress, plus ended ones whose reservation the limiter has not settled yet; 0 means
        that the gateway is idle."""
        return self._path.active

    @property
    def virtual_models(self) -> Collection[str]:
        """The names of the virtual models."""
        return self._routes.names if self._routes is not None else ()

    def batch_homes(self, virtual_model: str, tenant: Tenant | None) -> Sequence[str]:
        """Return the base models that may answer a tenant's batch requests for a virtual model, by name; see
        `RouteRunner.batch_homes`."""
        return self._routes.batch_homes(virtual_model, tenant) if self._routes is not None else ()

    def arriving(self, request_id: str, ingress: Ingress) -> ArrivingRequest:
        """Return a context manager for what a protocol does with a request before `generate`, such as authentication
        and parsing. It yields an `ArrivingRequest`, and reports the request to the observers if the block raises."""
        return self._path.arriving(request_id, ingress)

    def generate(
        self, principal: Principal, request: GenerateRequest, begun: Callable[[], None] = lambda: None
    ) -> AbstractAsyncContextManager[Generation]:
        """Return an async context manager that runs a request, and yields its generation once the first chunk has come,
        which the engine sends when it begins to work on the request. Leaving the block early aborts the request.

        `begun` is called once, when that chunk has come. A virtual model may hold back its members' answers; then it is
        called long before the block is entered, when the first member begins to work.

        Enter, iterate and leave in the same task: when a deadline passes, the gateway cancels that task, and the
        cancellation becomes DEADLINE_EXCEEDED on exit. The reservation is settled by the time the context has exited.

        Raises:
            ApiError: on entry, every error that a generation can have; later ENGINE_UNAVAILABLE, PREEMPTED,
                DEADLINE_EXCEEDED, INTERNAL.
        """
        if self._routes is not None and request.model.model in self._routes:
            return self._routes.generate(principal, request, begun)
        choose = partial(self._engines.named, principal.tenant, request.model)
        return self._path.serve(principal, request, self._path.new_record(principal, request), choose, begun=begun)

    def end_requests(self) -> None:
        """End all requests, and later ones as they start, with ApiError (ENGINE_UNAVAILABLE), because the gateway is
        stopping. Tenants are charged for what was generated."""
        self._path.end_requests()

    async def close(self) -> None:
        """Cancel the shadow copies of requests for virtual models, and wait until the reservations of all ended
        requests are settled."""
        if self._routes is not None:
            await self._routes.close()
        await self._path.close()
