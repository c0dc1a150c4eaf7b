"""The way of a request: `RequestPath.serve`, from its record to its settlement, whatever backend computes the
answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from types import TracebackType

import structlog

from gateway.core.errors import MAX_QUOTED
from gateway.core.tenants import Principal
from gateway.core.trace_context import Ingress, new_id
from gateway.limiter.base import Limiter
from gateway.requests.backend import ORDINARY, Backend, Instruments, Observer, RunTerms
from gateway.requests.deadlines import Deadlines
from gateway.requests.progress import RequestTimes
from gateway.requests.record import STRANGER, Asked, Bill, RequestRecord, caller_of, record_error
from gateway.requests.reservations import Reservations
from gateway.requests.types import GenerateRequest, Generation

log = structlog.get_logger("gateway")


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
        tenant, lane = principal.tenant, principal.tenant.effective_lane(request.urgency.lane)
        with self._recorded(record):
            backend = choose()
            record.served.base_model, record.served.adapter = backend.name, backend.adapter_name
            with backend.place(tenant, lane, request):
                backend.check(tenant, request)
                admitting = self._reservations.admitting(request, record, terms)
                left = request.time_limits.after(self.clock() - record.times.started)
                async with self._deadlines.start(lane, left) as timer, admitting:
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
            caller=caller_of(principal),
            asked=Asked(request.model.model[:MAX_QUOTED], request.urgency.lane, request.n),
            lane=principal.tenant.effective_lane(request.urgency.lane),
            times=RequestTimes(self.clock() if started is None else started),
            ingress=request.ingress,
            trace_id=request.ingress.trace_id,
            bill=Bill(deferred=request.deferred),
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
            if not record.outcome.finish:
                record.end("cancelled", 499)
        except BaseException as error:
            record_error(record, error)
            raise
        finally:
            record.times.ended = self.clock()
            del self.live[record.id]
            notify_observers(self._observers, record)


class ArrivingRequest:
    """A request for generation before it is passed to `Gateway.generate`; a context manager, see `Gateway.arriving`.

    If its block raises, the request's record with that error is reported to the observers. `Gateway.generate` reports a
    request whose block succeeds.
    """

    def __init__(
        self, request_id: str, ingress: Ingress, observers: Sequence[Observer], clock: Callable[[], float]
    ) -> None:
        """`clock` is the gateway's clock, in seconds; the request arrives now."""
        self.ingress = ingress
        self._request_id = request_id
        self._observers = observers
        self._clock = clock
        self._started = clock()
        self._principal: Principal | None = None

    def identify(self, principal: Principal) -> Principal:
        """Remember the caller, so that a later refusal is recorded under its tenant and key, and return it. Raises
        ApiError: FORBIDDEN, the caller is an administrator."""
        self._principal = principal
        return principal.as_tenant()

    def __enter__(self) -> ArrivingRequest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            record = self._record()
            record_error(record, error)
            record.times.ended = self._clock()
            notify_observers(self._observers, record)

    def _record(self) -> RequestRecord:
        """Return a new record for a request that is refused before generation; it has no model and no lane."""
        return RequestRecord(
            id=new_id(),
            request_id=self._request_id,
            caller=caller_of(self._principal) if self._principal else STRANGER,
            asked=Asked(),
            lane=None,
            times=RequestTimes(self._started),
            ingress=self.ingress,
            trace_id=self.ingress.trace_id,
        )


def notify_observers(observers: Sequence[Observer], record: RequestRecord) -> None:
    """Report a finished request to all observers. A failing observer is logged, and affects neither the other observers
    nor the answer."""
    for observer in observers:
        try:
            observer.finished(record)
        except Exception:
            log.exception("observer_failed", observer=type(observer).__name__, request_id=record.request_id)
