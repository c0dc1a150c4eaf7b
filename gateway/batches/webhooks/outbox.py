"""Webhook events that are not yet delivered, in Redis: one sorted set per tenant, scored by the Unix time at which each
event is due.

The script that ends a batch also adds its event to the set, so that neither happens without the other. The set has the
same hash tag as the tenant's other keys.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from gateway.batches.webhooks.event import Event
from gateway.redis.client import RedisCalls, Script


@dataclass(frozen=True, slots=True)
class Claim:
    """Events that this gateway has claimed for delivery, and when. Other gateways may claim those that are left once
    the seconds passed to `Outbox.claim` are over."""

    events: tuple[Event, ...]
    pending: int
    """Number of the tenant's undelivered events, including the claimed ones."""
    asked_at: float
    """Time of the claim, in Unix seconds on Redis's clock."""
    _here: float
    """Time of the claim, in seconds on this process's monotonic clock."""

    def now(self) -> float:
        """Return the current time in Unix seconds on Redis's clock, extrapolated from the time of the claim."""
        return self.asked_at + time.monotonic() - self._here


class Outbox:
    """Undelivered events of one tenant, to which the script that ends a batch adds. All methods raise StoreError if
    Redis fails."""

    def __init__(self, calls: RedisCalls, tenant: str) -> None:
        self._calls, self._key = calls, calls.key("webhooks", tenant)
        self._claim = Script.load("claim.lua", package="gateway.batches.webhooks")

    async def claim(self, seconds: float, limit: int) -> Claim:
        """Claim at most `limit` due events. Those that are not removed or put off are due again after `seconds`."""
        here = time.monotonic()
        now, pending, due = await self._calls.run(self._claim, [self._key], [repr(seconds), limit])
        return Claim(tuple(Event.parse(word.decode()) for word in due), int(pending), float(now), here)

    async def put_off(self, event: Event, until: float) -> None:
        """Make an event due at `until` (Unix seconds on Redis's clock). Does nothing if it was removed meanwhile."""
        async with self._calls.guard() as client:
            await client.zadd(self._key, {event.encoded: until}, xx=True)

    async def remove(self, event: Event) -> None:
        async with self._calls.guard() as client:
            await client.zrem(self._key, event.encoded)
