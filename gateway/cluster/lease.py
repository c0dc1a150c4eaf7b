"""Decides which one of several `loralane serve` has Ray start the engines: the one that holds a lease in Redis."""

from __future__ import annotations

from contextlib import suppress

from redis.asyncio import Redis
from redis.exceptions import LockError

LEASE_SECONDS = 10.0
"""Seconds for which the lease is held without being renewed."""


class Lease:
    """A lease that one process of a deployment holds at a time."""

    def __init__(self, redis: Redis, prefix: str) -> None:
        """`prefix` is the beginning of all keys of this deployment."""
        self._lock = redis.lock(f"{prefix}engines-owner", timeout=LEASE_SECONDS, thread_local=False)

    async def hold(self) -> bool:
        """Take or renew the lease; returns whether this process holds it now. Raises a RedisError or OSError if Redis
        does not answer."""
        try:
            return await self._lock.reacquire()
        except LockError:  # it was never held, or has expired
            return await self._lock.acquire(blocking=False)

    async def give_up(self) -> None:
        """Release the lease, if this process holds it, so that another can take it at once."""
        with suppress(LockError):
            await self._lock.release()
