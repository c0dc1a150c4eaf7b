"""Queue of settlements and usage that could not be delivered to Redis and are sent once Redis answers again."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from math import inf

import structlog
from msgspec import Struct
from msgspec.structs import replace

from gateway.core.usage import NOTHING, Counts
from gateway.limiter.base import Grant
from gateway.limiter.usage_spool import UsageSpool
from gateway.redis.client import RedisCalls, StoreError
from gateway.redis.pipeline import Attempts

log = structlog.get_logger("limiter")

MAX_PENDING = 65_536
RETRY_SECONDS = 1.0
"""Seconds between two attempts to deliver the queue to Redis, unless another call finds out earlier that Redis is
back."""


class Correction(Struct, frozen=True):
    """Settlement of a reservation: the requests (1, or 0 to undo it) and tokens that it really used."""

    grant: Grant
    requests: int
    tokens: int
    uncertain: bool = False
    """True means that it is unknown whether Redis has made the reservation or may still receive it."""
    counts: Counts = NOTHING
    """Usage of the request, which is counted if this correction settles it."""
    made: float = inf
    """Time of the settlement, in seconds on the limiter's clock."""
    alone: Counts | None = None
    """Usage that is counted by itself if Redis does not know the reservation, because it has then lost it. None means
    that nothing is: Redis may have received this settlement before, and have ended the reservation by it."""


class PendingSettlements:
    """Queue of settlements for Redis, and of usage admitted without it, retried until delivered by `send`, which raises
    StoreError; beyond MAX_PENDING the oldest is lost. Other methods do not raise."""

    def __init__(
        self, calls: RedisCalls, usage_spool: UsageSpool, send: Callable[[Correction, Attempts], Awaitable[int]]
    ) -> None:
        self.usage_spool = usage_spool
        self.lost_tokens = 0
        """Tokens that were used and will never be counted."""
        self._calls = calls
        self._send = send
        self._corrections: deque[Correction] = deque()
        self._delivery: asyncio.Task[None] | None = None
        self._retrying: asyncio.Task[None] | None = None

    @property
    def undelivered_tokens(self) -> int:
        """Number of tokens that were used and are not known to be counted in Redis. Of a waiting settlement's tokens,
        lease renewals may have counted a part already."""
        settlements = sum(correction.counts.tokens for correction in self._corrections)
        return settlements + sum(counts.tokens for _, _, counts in self.usage_spool.rows())

    async def send_or_queue(self, correction: Correction) -> None:
        """Send a correction now or, if Redis is unavailable or fails, queue it until Redis answers again."""
        if not self._calls.allowed():
            self.add(correction)
            return
        with suppress(StoreError):
            await self._send_or_keep(correction)

    def add(self, correction: Correction) -> None:
        if len(self._corrections) >= MAX_PENDING:
            self.record_loss(self._corrections.popleft())
        self._corrections.append(correction)
        self._keep_trying()

    def record_loss(self, correction: Correction) -> None:
        if not correction.counts:
            return
        self.lost_tokens += correction.counts.tokens
        log.error("usage_lost", lease=correction.grant.lease, counts=correction.counts.encoded())

    def count(self, grant: Grant, counts: Counts) -> None:
        """Queue the usage of a request of whose reservation Redis knows nothing: another limiter admitted it with
        `grant`, or Redis has lost it. A task delivers it to Redis."""
        self.usage_spool.add(grant.request, grant.day, counts)
        self._keep_trying()

    @property
    def is_due(self) -> bool:
        return bool(self._corrections) or not self.usage_spool.is_empty

    def deliver_soon(self) -> None:
        if self.is_due and (self._delivery is None or self._delivery.done()):
            self._delivery = asyncio.create_task(self._deliver(), name="limiter-pending")

    async def close(self) -> None:
        """Stop retrying, try once more to send everything that waits, and log the usage of each correction and each
        usage row that is lost because Redis does not answer."""
        if self._retrying is not None:
            self._retrying.cancel()
            await asyncio.wait([self._retrying])
        if self._delivery is not None:
            await self._delivery
        await self._deliver()
        for correction in self._corrections:
            self.record_loss(correction)
        self.lost_tokens += self.usage_spool.report_lost()

    async def _send_or_keep(self, correction: Correction) -> None:
        attempts = Attempts()
        try:
            await self._send(correction, attempts)
        except (StoreError, asyncio.CancelledError) as error:
            is_undone = isinstance(error, StoreError) and error.is_refusal and not attempts.repeated
            self.add(correction if is_undone else replace(correction, alone=None))
            raise

    async def _deliver(self) -> None:
        """Send all waiting corrections and usage; stop without an error if Redis is unavailable again."""
        with suppress(StoreError):
            while self._corrections:
                await self._send_or_keep(self._corrections.popleft())
            await self.usage_spool.deliver()

    def _keep_trying(self) -> None:
        """Start a task, if something waits and none runs, that retries settlements and usage every RETRY_SECONDS."""
        if self.is_due and (self._retrying is None or self._retrying.done()):
            self._retrying = asyncio.create_task(self._keep_delivering(), name="limiter-retries")

    async def _keep_delivering(self) -> None:
        while self.is_due:
            await asyncio.sleep(RETRY_SECONDS)
            if self._calls.allowed():
                await self._deliver()
