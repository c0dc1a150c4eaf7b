"""Reserves what a request may use, settles what it has used, and counts requests that end before they are reserved."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import structlog

from engine.core.messages.requests import Lane
from gateway.core.errors import ApiError, Fault
from gateway.core.lanes import lane_name
from gateway.core.usage import NOTHING, Counts
from gateway.limiter.base import Grant, Limiter, ReserveRequest
from gateway.requests.backend import NeededTokens, RunTerms
from gateway.requests.record import RequestRecord
from gateway.requests.types import GenerateRequest

log = structlog.get_logger("gateway")

T = TypeVar("T")

COUNTED_ONLY = NeededTokens(0, None)
"""Tokens of a reservation that only counts a request."""


class Reservations:
    """Reserves and settles the requests of one gateway. Even if the client, the engine or the limiter fails, each
    reservation is settled exactly once."""

    def __init__(self, limiter: Limiter, clock: Callable[[], float]) -> None:
        """`clock` is that of the records."""
        self._limiter = limiter
        self._clock = clock
        self._background: set[asyncio.Task[Any]] = set()

    @property
    def num_unsettled(self) -> int:
        """Number of ended requests that the limiter has not counted or settled yet."""
        return len(self._background)

    @asynccontextmanager
    async def admitting(self, request: GenerateRequest, record: RequestRecord, terms: RunTerms) -> AsyncIterator[None]:
        """Refuse a request whose tenant is beyond its limits of requests before the block, which tokenizes the prompts
        and reserves tokens. Count the request, without tokens, if the block ends before the limiter has granted the
        reservation. Otherwise a tenant could have any number of prompts tokenized for nothing. Raises what the block
        raises, and ApiError: RATE_LIMIT_EXCEEDED, LIMITER_UNAVAILABLE, which replace any other ApiError of the
        block."""
        if terms.is_charged:
            await self._check_requests(_wanted(record, terms), record)
        try:
            yield
        except BaseException as error:
            if terms.is_charged and not record.bill.is_granted and _is_counted(error, request):
                # The next run of its request asks whether it is counted.
                refusal = await self._to_its_end(self._count_refused(_wanted(record, terms), record))
                if refusal is not None and isinstance(error, ApiError) and error.http_status != 429:
                    try:
                        raise refusal from error
                    finally:
                        del refusal  # its traceback refers to this frame: a cycle would keep what the frame holds
            raise

    @asynccontextmanager
    async def reserved(
        self, needed: NeededTokens, record: RequestRecord, begin: Callable[[], object], terms: RunTerms
    ) -> AsyncIterator[Mapping[str, str]]:
        """Reserve tokens if the run is charged to its tenant, yield the response headers of the limits, and on exit
        settle the grant once, even if cancelled, or write the usage of a batch's line to the record's `deferred`.
        Raises ApiError: RATE_LIMIT_EXCEEDED, INSUFFICIENT_QUOTA, LIMITER_UNAVAILABLE.

        If the limiter is almost sure to grant the reservation of an interactive request, `begin` is called before Redis
        has answered, to submit the request to the engine. This reduces the time of a request that runs alone to 0.90 of
        what it would be.
        """
        if not terms.is_charged:
            yield {}
            return
        wanted = _wanted(record, terms, needed)
        record.bill.reserved_tokens = wanted.tokens
        try:
            if record.lane is Lane.INTERACTIVE and self._limiter.likely_to_grant(wanted):
                begin()
            record.times.reserving = self._clock()
            grant = await self._limiter.reserve(wanted)
        except BaseException:
            record.withdraw()
            raise
        finally:
            record.times.reserved = self._clock()
        bill = record.bill
        bill.is_granted, bill.shadowed, bill.reserved_tokens = True, grant.shadowed, grant.reserved
        try:
            yield grant.headers()
        finally:
            if bill.deferred is not None:
                bill.deferred.add({(grant.day, grant.request.row): record.counts()})
            await self._to_its_end(self._settle(grant, record))

    async def close(self) -> None:
        """Wait until the reservations of all ended requests are settled."""
        while self._background:
            await asyncio.wait(self._background)

    async def _check_requests(self, wanted: ReserveRequest, record: RequestRecord) -> None:
        asked = self._clock()
        try:
            await self._limiter.check_requests(wanted)
        except ApiError:
            record.times.reserving, record.times.reserved = asked, self._clock()
            raise

    async def _count_refused(self, wanted: ReserveRequest, record: RequestRecord) -> ApiError | None:
        """Charge a refused request to its tenant. Return the limiter's error if it refuses that, else None."""
        try:
            grant = await self._limiter.reserve(wanted)
        except ApiError as refusal:
            return refusal
        record.bill.is_granted, record.bill.shadowed = True, grant.shadowed
        await self._settle(grant, record)
        return None

    async def _settle(self, grant: Grant, record: RequestRecord) -> None:
        try:
            await self._limiter.settle(grant, record.used_tokens)
        except Exception:  # the answer has been sent; operators must learn that the accounts are wrong
            log.exception("settle_failed", request_id=record.request_id, tenant=record.caller.tenant)

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


def _wanted(record: RequestRecord, terms: RunTerms, needed: NeededTokens = COUNTED_ONLY) -> ReserveRequest:
    """Return what to ask the limiter for: one request of the record's tenant, and the tokens of `terms.reserved_runs`
    runs."""
    assert record.lane is not None, "its lane is known"
    owner, is_deferred = (record.caller.tenant, record.caller.limits_key), record.bill.deferred is not None
    tokens, lane = needed.tokens * terms.reserved_runs, lane_name(record.lane)
    used = _nothing if is_deferred else record.counts
    served, counted = record.served.name, terms.is_counted
    return ReserveRequest(record.request_id, *owner, tokens, served, lane, used, needed.least, counted, is_deferred)


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
