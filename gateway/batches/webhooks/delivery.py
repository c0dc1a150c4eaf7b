"""Delivers webhook events, each at least once. One gateway at a time claims an event and removes it from the outbox
when it is done.

If a gateway dies after the receiver has answered and before the event is removed, another gateway delivers the event
again under the same id.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import uniform

import httpcore
import httpx
import structlog
from redis.asyncio import Redis

from gateway.batches.webhooks.event import Event, signed_headers
from gateway.batches.webhooks.network import Resolver, post
from gateway.batches.webhooks.outbox import Claim, Outbox
from gateway.config.webhooks import WebhookConfig
from gateway.core.safe_url import UnsafeUrl
from gateway.redis.client import RedisCalls, StoreError

AT_ONCE = 4
"""Maximum number of events that one process claims and delivers at once for one tenant."""
CALL_SECONDS = 2.0
"""Timeout of one call to Redis, in seconds."""
GONE = 410
GONE_REASON = f"http {GONE}"

Count = Callable[[str], None]
"""Callback that receives the result of every attempt: "delivered", "failed" (will be tried again) or "given_up"."""

log = structlog.get_logger("webhooks")


class Courier:
    """Delivers one tenant's events in a background task, from its creation until `close`. Each tenant has its own, so
    that a slow receiver does not delay others."""

    def __init__(
        self,
        tenant: str,
        endpoint: WebhookConfig,
        outbox: Outbox,
        count: Count,
        tls: ssl.SSLContext,
        timing: DeliveryTiming,
    ) -> None:
        self.pending = 0
        """Number of the tenant's undelivered events at the last claim, less those delivered or given up since."""
        self._tenant, self._endpoint, self._outbox = tenant, endpoint, outbox
        self._count, self._tls, self._timing = count, tls, timing
        self._resolver = Resolver()
        self._closing = False
        self._task = asyncio.create_task(self._run(), name=f"webhooks-{tenant}")

    async def close(self) -> None:
        """Stop delivering and wait for the end of the task. Events under way are left to other gateways."""
        self._closing = True  # redis-py may swallow a cancellation that meets it between two reads
        self._task.cancel()
        await asyncio.wait([self._task])
        self._resolver.close()

    async def _run(self) -> None:
        away = False
        while not self._closing:
            worked = False
            try:
                worked = await self._turn()
                away = False
            except StoreError as error:
                if not away:
                    log.warning("webhook_outbox_away", tenant=self._tenant, reason=str(error))
                away = True
            except Exception:  # a bug: without another try, this tenant's events would never be delivered
                log.exception("webhooks_not_delivered", tenant=self._tenant)
            if not worked:
                await asyncio.sleep(self._timing.poll)

    async def _turn(self) -> bool:
        """Claim and deliver up to AT_ONCE events that are due. Return whether there were any. Raises StoreError."""
        claim = await self._outbox.claim(self._timing.lease, AT_ONCE)
        self.pending = claim.pending
        results = await asyncio.gather(*(self._deliver(event, claim) for event in claim.events), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return bool(claim.events)

    async def _deliver(self, event: Event, claim: Claim) -> None:
        """Deliver one event and remove it from the outbox, put it off after a failure, or give it up if it is too old
        or the status is 410. Raises StoreError if the outcome could not be stored."""
        if event.type not in self._endpoint.events:
            await self._outbox.remove(event)
            self.pending = max(0, self.pending - 1)
            return
        failure = await self._try(event, claim)
        if failure is None:
            await self._end(event, "delivered")
            return
        age = claim.now() - event.ended_at
        about = {"tenant": self._tenant, "event_id": event.id, "batch_id": event.batch_id, "reason": failure}
        if age > self._timing.give_up or failure == GONE_REASON:
            log.error("webhook_given_up", **about)
            await self._end(event, "given_up")
        else:
            log.warning("webhook_failed", **about)
            self._count("failed")
            await self._outbox.put_off(event, claim.now() + self._timing.retry_in(age))

    async def _end(self, event: Event, outcome: str) -> None:
        self._count(outcome)
        await self._outbox.remove(event)
        self.pending = max(0, self.pending - 1)

    async def _try(self, event: Event, claim: Claim) -> str | None:
        """Send an event once, signed with the current time of `claim.now`. Return None for a 2xx status, else the
        reason of the failure as text, without the parts of the URL that may be secret."""
        body, endpoint = event.body(), self._endpoint
        headers = signed_headers(event, body, endpoint.key, int(claim.now()))
        try:
            async with asyncio.timeout(self._timing.timeout):
                status = await post(
                    endpoint.place, headers, body, self._tls, self._resolver, inner=endpoint.allow_private
                )
        except TimeoutError:
            return f"no answer within {self._timing.timeout:g} s"
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, UnsafeUrl) as error:
            return f"{type(error).__name__}: {error}"
        return None if 200 <= status < 300 else f"http {status}"


@asynccontextmanager
async def delivering(
    client: Redis,
    prefix: str,
    endpoints: Mapping[str, WebhookConfig],
    count: Count,
    *,
    tls: ssl.SSLContext | None = None,
    timing: DeliveryTiming | None = None,
) -> AsyncIterator[list[Courier]]:
    """Start a courier for each tenant in `endpoints` and yield all of them. On exit they are closed.

    Args:
        prefix: prefix of all Redis keys.
        count: called with the result of every attempt.
        tls: context with the trusted certificate authorities. None means the default ones, or those of SSL_CERT_FILE.
        timing: None means the defaults of `DeliveryTiming`.
    """
    calls = RedisCalls.without_breaker(client, prefix, CALL_SECONDS)
    trusted, timing = tls or httpx.create_ssl_context(), timing or DeliveryTiming()
    couriers = [
        Courier(tenant, endpoint, Outbox(calls, tenant), count, trusted, timing)
        for tenant, endpoint in endpoints.items()
    ]
    try:
        yield couriers
    finally:
        await asyncio.gather(*(courier.close() for courier in couriers))


DAY = 86_400.0


@dataclass(frozen=True, slots=True)
class DeliveryTiming:
    """Timing of deliveries, in seconds: the pause between polls of an outbox without due events, the time limit of one
    attempt, the term of a claim, the bounds of the pause before a retry, and the age at which an event is given up."""

    poll: float = 1.0
    """Pause between two polls of an outbox without due events."""
    timeout: float = 10.0
    """Time limit of one attempt, from resolving the host name to receiving the status line."""
    lease: float = 30.0
    """Time after which another gateway may claim a claimed event. It is longer than a delivery with a slow Redis."""
    first_retry: float = 5.0
    longest_retry: float = 3 * 3600.0
    give_up: float = 3 * DAY
    """Age at which a failed event is given up."""

    def retry_in(self, age: float) -> float:
        """Return the seconds until an event of this age (in seconds) is tried again: its age, at least `first_retry`
        and at most `longest_retry`, times a random factor from 0.5 to 1.5. The age thus about doubles between attempts,
        and a server that comes back is not hit by all events at once."""
        return min(max(age, self.first_retry), self.longest_retry) * uniform(0.5, 1.5)
