"""Events that are yet to be told, in Redis: one sorted set a tenant, by the Unix time at which each is due.

The step that ends a job puts its event there in the same script, so that neither is without the other; the set has the
hash tag of everything else that is the tenant's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import resources

from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.batches.webhooks.event import Event

CALL_SECONDS = 2.0


class OutboxAway(Exception):
    """Redis does not answer, or not in time."""


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


def outbox_key(prefix: str, tenant: str) -> str:
    """What the script that ends a job is given, to add a member `Event.word` with the score now."""
    return f"{prefix}webhooks:{{{tenant}}}"


class Outbox:
    """One tenant's. Every method raises OutboxAway."""

    def __init__(self, client: Redis, key: str) -> None:
        self._client, self._key = client, key
        script = (resources.files("gateway.batches.webhooks") / "claim.lua").read_text(encoding="utf-8")
        self._claim = client.register_script(script)

    async def claim(self, seconds: float, limit: int) -> Claim:
        """At most `limit` events that are due; if nobody says what became of them, others get them in `seconds`."""
        here = time.monotonic()
        async with _answering():
            now, pending, due = await self._claim([self._key], [seconds, limit])
        return Claim(tuple(Event.parse(word.decode()) for word in due), int(pending), float(now), here)

    async def put_off(self, event: Event, until: float) -> None:
        """`until`: Unix time. Does nothing if it was delivered meanwhile."""
        async with _answering():
            await self._client.zadd(self._key, {event.word: until}, xx=True)

    async def remove(self, event: Event) -> None:
        async with _answering():
            await self._client.zrem(self._key, event.word)


@asynccontextmanager
async def _answering() -> AsyncGenerator[None, None]:
    try:
        async with asyncio.timeout(CALL_SECONDS):
            yield
    except (RedisError, OSError) as error:
        raise OutboxAway(str(error) or "no answer in time") from error
