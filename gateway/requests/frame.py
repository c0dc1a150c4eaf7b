"""What every request runs in, whether an engine or an upstream serves it: record, time limits and reservation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import structlog

from engine.core.messages.requests import Lane
from gateway.core.errors import MAX_QUOTED, ApiError, Fault
from gateway.core.lanes import lane_name
from gateway.core.tenants import Principal
from gateway.core.trace_context import new_id
from gateway.core.usage import NOTHING, Counts
from gateway.limiter.base import Grant, Limiter, ReserveRequest
from gateway.requests.admission import ServiceSettings
from gateway.requests.deadlines import Deadlines, Timer
from gateway.requests.member_run import MemberRun
from gateway.requests.observers import Observer, notify_observers
from gateway.requests.record import RequestRecord, record_error
from gateway.requests.types import GenerateRequest

log = structlog.get_logger("gateway")

T = TypeVar("T")


class RequestFrame:
    """Records, limits and settles the requests of one gateway. Even if the client, the engine or the limiter fails,
    every request is removed from the live table, and its reservation is settled exactly once."""

    def __init__(
        self,
        limiter: Limiter,
        settings: ServiceSettings,
        observers: Sequence[Observer],
        clock: Callable[[], float],
    ) -> None:
        self.clock = clock
        self.live: dict[str, RequestRecord] = {}
        """Records of the requests in progress, by their unique ids."""
        self.observers = observers
        self._limiter = limiter
        self._deadlines = Deadlines(settings)
        self._background: set[asyncio.Task[Any]] = set()

    @property
    def active(self) -> int:
        """Number of requests in progress, plus ended ones whose reservation the limiter has not settled yet."""
        return len(self.live) + len(self._background)

    @contextmanager
    def recorded(
        self, principal: Principal, request: GenerateRequest, lane: Lane, run: MemberRun | None
    ) -> Iterator[RequestRecord]:
        """Yield a new record for the request, which is in the live table during the block. On exit, complete the record
        and report it to the observers."""
        record = RequestRecord(
            id=new_id(),
            request_id=request.request_id,
            tenant=principal.tenant.name,
            key_id=principal.key_id,
            limits_key=principal.limits_key,
            model=request.model.model[:MAX_QUOTED],
            lane_asked=request.lane,
            lane=lane,
            started=run.started if run else self.clock(),
            ingress=request.ingress,
            trace_id=request.ingress.trace_id,
            deferred=request.deferred,
        )
        if run is not None:
            run.record = record
            record.member, record.member_reason, record.suspect = run.member, run.reason, run.suspect
            if not run.is_charged:
                record.waive()
        self.live[record.id] = record
        try:
            yield record
            if not record.finish:
                record.end("cancelled", 499)
        except BaseException as error:
            record_error(record, error)
            raise
        finally:
            record.ended = self.clock()
            del self.live[record.id]
            notify_observers(self.observers, record)

    def timer(self, request: GenerateRequest, lane: Lane, record: RequestRecord) -> Timer:
        """Return the request's timer, which the time since the caller's request arrived has partly used. Raises what
        `Deadlines.start` raises."""
        deadline = request.deadline
        if deadline is not None:
            deadline -= self.clock() - record.started
        return self._deadlines.start(lane, deadline, request.stall, ignore_server_timeout=request.ignore_server_timeout)

    def reservation(
        self, record: RequestRecord, run: MemberRun | None, tokens: int = 0, least: int | None = None
    ) -> ReserveRequest:
        """Return what to ask the limiter for: one request of the record's tenant, with `tokens` and `least` as in
        `ReserveRequest`. A run that an earlier one of the same request has counted already does not count again."""
        assert record.lane is not None, "its lane is known"
        lane, counted = lane_name(record.lane), run is not None and run.is_counted
        owner, is_deferred = (record.tenant, record.limits_key), record.deferred is not None
        used = _nothing if is_deferred else record.counts
        return ReserveRequest(
            record.request_id, *owner, tokens, record.served_name, lane, used, least, counted, is_deferred
        )

    @asynccontextmanager
    async def admitting(
        self, request: GenerateRequest, record: RequestRecord, run: MemberRun | None
    ) -> AsyncIterator[None]:
        """Refuse a request whose tenant is beyond its limits of requests before the block, which tokenizes the prompts
        and reserves tokens. Count the request, without tokens, if the block ends before the limiter has granted the
        reservation. Otherwise a tenant could have any number of prompts tokenized for nothing. Raises what the block
        raises, and ApiError: RATE_LIMIT_EXCEEDED, LIMITER_UNAVAILABLE, which replace any other ApiError of the
        block."""
        is_charged = run is None or run.is_charged
        if is_charged:
            await self._check_requests(self.reservation(record, run), record)
        try:
            yield
        except BaseException as error:
            if is_charged and not record.is_granted and _is_counted(error, request):
                # The next run of its request asks whether it is counted.
                refusal = await self._to_its_end(self._count_refused(self.reservation(record, run), record))
                if refusal is not None and isinstance(error, ApiError) and error.http_status != 429:
                    try:
                        raise refusal from error
                    finally:
                        del refusal  # its traceback refers to this frame: a cycle would keep what the frame holds
            raise

    @asynccontextmanager
    async def reserved(
        self, wanted: ReserveRequest, record: RequestRecord, begin: Callable[[], object], *, is_charged: bool
    ) -> AsyncIterator[Mapping[str, str]]:
        """Reserve tokens if the request `is_charged` to its tenant, yield the response headers of the limits, and on
        exit settle the grant once, even if cancelled, or write the usage of a batch's line to the record's `deferred`.
        Raises ApiError: RATE_LIMIT_EXCEEDED, INSUFFICIENT_QUOTA, LIMITER_UNAVAILABLE.

        If the limiter is almost sure to grant the reservation of an interactive request, `begin` is called before Redis
        has answered, to submit the request to the engine. This reduces the time of a request that runs alone to 0.90 of
        what it would be.
        """
        if not is_charged:
            yield {}
            return
        record.reserved_tokens = wanted.tokens
        try:
            if record.lane is Lane.INTERACTIVE and self._limiter.likely_to_grant(wanted):
                begin()
            record.reserving = self.clock()
            grant = await self._limiter.reserve(wanted)
        except BaseException:
            record.withdraw()
            raise
        finally:
            record.reserved = self.clock()
        record.is_granted, record.shadowed, record.reserved_tokens = True, grant.shadowed, grant.reserved
        try:
            yield grant.headers()
        finally:
            if record.deferred is not None:
                record.deferred.add({(grant.day, grant.request.row): record.counts()})
            await self._to_its_end(self._settle(grant, record))

    def end_requests(self) -> None:
        """End all requests, and later ones as they start, with ApiError (ENGINE_UNAVAILABLE)."""
        self._deadlines.stop_all()

    async def close(self) -> None:
        """Wait until the reservations of all ended requests are settled."""
        while self._background:
            await asyncio.wait(self._background)

    async def _check_requests(self, wanted: ReserveRequest, record: RequestRecord) -> None:
        asked = self.clock()
        try:
            await self._limiter.check_requests(wanted)
        except ApiError:
            record.reserving, record.reserved = asked, self.clock()
            raise

    async def _count_refused(self, wanted: ReserveRequest, record: RequestRecord) -> ApiError | None:
        """Charge a refused request to its tenant. Returns the limiter's error if it refuses that, else None."""
        try:
            grant = await self._limiter.reserve(wanted)
        except ApiError as refusal:
            return refusal
        record.is_granted, record.shadowed = True, grant.shadowed
        await self._settle(grant, record)
        return None

    async def _settle(self, grant: Grant, record: RequestRecord) -> None:
        try:
            await self._limiter.settle(grant, record.used_tokens)
        except Exception:  # the answer has been sent; operators must learn that the accounts are wrong
            log.exception("settle_failed", request_id=record.request_id, tenant=record.tenant)

    async def _to_its_end(self, work: Coroutine[None, None, T]) -> T:
        """Do `work` in a task of its own, and return its result. A cancellation meanwhile is raised only when the work
        is done: a virtual model's next run relies on it, such as on the slot that a settlement frees."""
        task, is_cancelled = asyncio.create_task(work), False
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        while not task.done():
            try:
                await asyncio.wait((task,))
            except asyncio.CancelledError:
                is_cancelled = True
        if is_cancelled:
            raise asyncio.CancelledError
        return task.result()


def _nothing() -> Counts:
    return NOTHING


def _is_counted(error: BaseException, request: GenerateRequest) -> bool:
    """Return whether a request that ended with an error, without a grant, counts in the requests per minute. It does
    not if these or the slots refused it, nor if it is a line of a batch that the gateway will send again."""
    if not isinstance(error, ApiError):
        return not request.is_batch_line
    if error.limit_kind == "requests" or error.fault is Fault.LIMITER_UNAVAILABLE:
        return False
    return error.http_status == 400 or not request.is_batch_line
