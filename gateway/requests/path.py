"""The way of a request: `RequestPath.serve`, from its record to its settlement, whatever backend computes the
answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager

from gateway.core.errors import MAX_QUOTED
from gateway.core.tenants import Principal
from gateway.core.trace_context import Ingress, new_id
from gateway.limiter.base import Limiter
from gateway.requests.backend import Backend, Instruments
from gateway.requests.deadlines import Deadlines, Timer
from gateway.requests.observers import ArrivingRequest, notify_observers
from gateway.requests.record import RequestRecord, record_error
from gateway.requests.reservations import Reservations
from gateway.requests.terms import ORDINARY, RunTerms
from gateway.requests.times import RequestTimes
from gateway.requests.types import GenerateRequest, Generation


class RequestPath:
    """Runs single requests of one gateway. Even if the client, the engine or the limiter fails, every request is
    removed from the live table, its streams are closed, and its reservation is settled exactly once."""

    def __init__(self, limiter: Limiter, instruments: Instruments) -> None:
        self.clock = instruments.clock
        self.live: dict[str, RequestRecord] = {}
        """Records of the requests in progress, by their unique ids."""
        self._observers = instruments.observers
        self._reservations = Reservations(limiter, instruments.clock)
        self._deadlines = Deadlines(instruments.settings)

    @property
    def active(self) -> int:
        """Number of requests in progress, plus ended ones whose reservation the limiter has not settled yet."""
        return len(self.live) + self._reservations.num_unsettled

    @asynccontextmanager
    async def serve(
        self,
        principal: Principal,
        request: GenerateRequest,
        record: RequestRecord,
        choose: Callable[[], Backend],
        terms: RunTerms = ORDINARY,
        begun: Callable[[], None] = lambda: None,
    ) -> AsyncIterator[Generation]:
        """Run a request with the backend that `choose` returns, as `Gateway.generate` says. `record` is a new one of
        `new_record`. `choose` may raise ApiError (MODEL_NOT_FOUND)."""
        tenant, lane = principal.tenant, principal.tenant.effective_lane(request.lane)
        with self._recorded(record):
            backend = choose()
            record.base_model, record.adapter = backend.name, backend.adapter_name
            with backend.place(tenant, lane, request):
                backend.check(tenant, request)
                admitting = self._reservations.admitting(request, record, terms)
                async with self._timer(request, record) as timer, admitting:
                    run = await backend.prepare(tenant, lane, request, record, terms.engine_wait)
                    reserved = self._reservations.reserved(run.needed, record, run.begin, terms)
                    async with (
                        run.held(),
                        reserved as headers,
                        timer.lifted_at_exit(),
                        aclosing(run.chunks(timer)) as chunks,
                    ):
                        first = await anext(chunks)
                        begun()
                        yield Generation(run.admitted(headers), first, chunks)

    def new_record(self, principal: Principal, request: GenerateRequest, started: float | None = None) -> RequestRecord:
        """Return a new record for a request that has arrived at `started` on the clock; None means now."""
        return RequestRecord(
            id=new_id(),
            request_id=request.request_id,
            tenant=principal.tenant.name,
            key_id=principal.key_id,
            limits_key=principal.limits_key,
            model=request.model.model[:MAX_QUOTED],
            lane_asked=request.lane,
            lane=principal.tenant.effective_lane(request.lane),
            times=RequestTimes(self.clock() if started is None else started),
            ingress=request.ingress,
            trace_id=request.ingress.trace_id,
            deferred=request.deferred,
        )

    def arriving(self, request_id: str, ingress: Ingress) -> ArrivingRequest:
        """Return a context manager for the work on a request before `serve`; see `Gateway.arriving`."""
        return ArrivingRequest(request_id, ingress, self._observers, self.clock)

    def end_requests(self) -> None:
        """End all requests, and later ones as they start, with ApiError (ENGINE_UNAVAILABLE)."""
        self._deadlines.stop_all()

    async def close(self) -> None:
        """Wait until the reservations of all ended requests are settled."""
        await self._reservations.close()

    @contextmanager
    def _recorded(self, record: RequestRecord) -> Iterator[None]:
        """Keep the record in the live table during the block. On exit, complete it and report it to the observers."""
        self.live[record.id] = record
        try:
            yield
            if not record.finish:
                record.end("cancelled", 499)
        except BaseException as error:
            record_error(record, error)
            raise
        finally:
            record.times.ended = self.clock()
            del self.live[record.id]
            notify_observers(self._observers, record)

    def _timer(self, request: GenerateRequest, record: RequestRecord) -> Timer:
        """Return the request's timer, which the time since the caller's request arrived has partly used. Raises what
        `Deadlines.start` raises."""
        assert record.lane is not None, "its lane is known"
        asked, is_only = request.deadline, request.ignore_server_timeout
        if asked is not None:
            asked -= self.clock() - record.times.started
        return self._deadlines.start(record.lane, asked, request.stall, ignore_server_timeout=is_only)
