"""Warns of a Redis that may evict keys when its memory is full: limits, usage and records vanish without an error."""

from __future__ import annotations

import asyncio
from typing import Any

import structlog
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.exceptions import ResponseError

from gateway.core.shared_poll import SharedPoll
from gateway.redis.client import FAILURES

LOOK_SECONDS = 60.0
CALL_SECONDS = 2.0
SAFE = "noeviction"

log = structlog.get_logger("redis")


class EvictionWatch:
    """Looks at the `maxmemory-policy` of a server, or of all primaries of a cluster, at most every LOOK_SECONDS."""

    def __init__(self, client: Redis | RedisCluster) -> None:
        self._client: Any = client
        self._policies = SharedPoll(self._look, LOOK_SECONDS)
        self._reported_policy = ""

    async def warning(self) -> str:
        """Return a sentence for operators if Redis may evict keys, which is also logged when it changes. Empty if it
        does not, or cannot be asked."""
        try:
            policies = await self._policies.get()
        except FAILURES:
            return ""
        policy = ", ".join(sorted(policies))
        if policy != self._reported_policy:
            self._reported_policy = policy
            if policy:
                log.warning("redis_may_evict", policy=policy, remedy=f"set maxmemory-policy {SAFE}")
        said = f"it may evict limits, usage and keys of tenants (maxmemory-policy {policy}); set {SAFE}"
        return said if policy else ""

    async def _look(self) -> set[str]:
        """Return the policies by which servers with a limit of memory evict keys. Those of a server that does not tell
        its policy, or refuses INFO, are taken for safe."""
        everywhere = {"target_nodes": RedisCluster.PRIMARIES} if isinstance(self._client, RedisCluster) else {}
        try:
            async with asyncio.timeout(CALL_SECONDS):
                info: dict[str, Any] = await self._client.info("memory", **everywhere)
        except ResponseError:
            return set()
        by_server = all(isinstance(value, dict) for value in info.values())
        servers = info.values() if by_server else [info]
        return {server.get("maxmemory_policy", SAFE) for server in servers if server.get("maxmemory")} - {SAFE}
