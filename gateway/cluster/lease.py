"""Decides which one of several `loralane serve` has Ray start the engines: the one that holds a lease in Redis."""

from __future__ import annotations

import uuid

from redis.asyncio import Redis

LEASE_MS = 10_000
"""Milliseconds for which the lease is held without being renewed."""


class Lease:
    """A lease that one process of a deployment holds at a time."""

    def __init__(self, redis: Redis, prefix: str) -> None:
        """`prefix` is the beginning of all keys of this deployment."""
        self._redis = redis
        self._key = f"{prefix}engines-owner"
        self._own = uuid.uuid4().hex.encode()

    async def hold(self) -> bool:
        """Take or renew the lease; returns whether this process holds it now. Raises a RedisError or OSError if Redis
        does not answer."""
        if await self._redis.set(self._key, self._own, nx=True, px=LEASE_MS):
            return True
        if await self._redis.get(self._key) != self._own:
            return False
        await self._redis.pexpire(self._key, LEASE_MS)
        return True

    async def give_up(self) -> None:
        """Release the lease, if this process holds it, so that another can take it at once."""
        if await self._redis.get(self._key) == self._own:
            await self._redis.delete(self._key)
