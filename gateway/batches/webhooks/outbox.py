"""Events that are yet to be told, in Redis: one sorted set a tenant, by the Unix time at which each is due.

The step that ends a job puts its event there in the same script, so that neither is without the other; the set has the
hash tag of everything else that is the tenant's.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from gateway.batches.webhooks.event import Event
from gateway.limiter.calls import RedisCalls, Script


@dataclass(frozen=True, slots=True)
class Claim:
    """Events that are this gateway's to deliver, until others may have them."""

    events: tuple[Event, ...]
    pending: int
    """Events of the tenant that are not delivered yet, these among them."""
    asked_at: float
    """Unix time on Redis's clock."""
    _here: float
    """The same on this process's monotonic clock."""

    def now(self) -> float:
        """Unix time on Redis's clock."""
        return self.asked_at + time.monotonic() - self._here


class Outbox:
    """One tenant's, to which the script that ends a job adds `Event.word`. Every method raises StoreError."""

    def __init__(self, calls: RedisCalls, tenant: str) -> None:
        self._calls, self._key = calls, calls.key("webhooks", tenant)
        self._claim = Script.load("claim.lua", package="gateway.batches.webhooks")

    async def claim(self, seconds: float, limit: int) -> Claim:
        """At most `limit` events that are due; if nobody says what became of them, others get them in `seconds`."""
        here = time.monotonic()
        now, pending, due = await self._calls.run(self._claim, [self._key], [repr(seconds), limit])
        return Claim(tuple(Event.parse(word.decode()) for word in due), int(pending), float(now), here)

    async def put_off(self, event: Event, until: float) -> None:
        """`until`: Unix time. Does nothing if it was delivered meanwhile."""
        async with self._calls.guard() as client:
            await client.zadd(self._key, {event.word: until}, xx=True)

    async def remove(self, event: Event) -> None:
        async with self._calls.guard() as client:
            await client.zrem(self._key, event.word)
