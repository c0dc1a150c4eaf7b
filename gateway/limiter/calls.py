"""Calls to Redis that never take long: each is bounded in time, and a circuit breaker learns how it went."""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import resources
from typing import Any, Self

from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.exceptions import NoScriptError, RedisError

from gateway.limiter.breaker import Breaker
from gateway.limiter.line import Line
from gateway.limiter.timeout import loop_timeout

Argument = str | int | bytes


PATIENCE = 20
"""How many times its usual time a call gets while Redis is not known to be away: with 50 ms, a second.

A Redis that is slow because the machine is busy is not away, and gateways that limit by themselves let more through:
with six busy processes beside, one round of six admitted twice its limit when every call had 50 ms. A server that is
gone refuses connections and is noticed at once; a silent one costs the requests under way this second, once.
"""


class StoreError(Exception):
    """Redis did not answer in time, answered with an error of its own, or is not being asked for a moment."""


@dataclass(frozen=True, slots=True)
class Script:
    """Lua with the digest Redis knows it by."""

    text: str
    sha: str

    @classmethod
    def load(cls, *names: str, package: str = "gateway.limiter") -> Script:
        folder = resources.files(package)
        text = "\n".join((folder / name).read_text(encoding="utf-8") for name in names)
        return cls(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


class RedisCalls:
    """Everything one part of a gateway asks of one server or cluster. Every key begins with `prefix`."""

    def __init__(
        self,
        client: Redis | RedisCluster,
        prefix: str,
        timeout: float,
        breaker: Breaker,
        answered: Callable[[], None],
        patience: int = PATIENCE,
    ) -> None:
        """
        Args:
            timeout: seconds of a call that finds out whether Redis is back.
            answered: called after every call that succeeds.
            patience: how many times `timeout` a call gets while Redis is not known to be away.
        """
        self._client: Any = client
        # A cluster has many connections, and its client knows which is whose.
        self._call = (
            self._of_cluster if isinstance(client, RedisCluster) else Line(client, timeout, self._patience).call
        )
        self._prefix = prefix
        self._timeout = timeout
        self._most_patience = patience
        self._breaker = breaker
        self._answered = answered

    @classmethod
    def patient(cls, client: Redis | RedisCluster, prefix: str, timeout: float) -> Self:
        """Calls without a breaker, for callers that have no stand-in for Redis. `timeout`: seconds of one call."""
        return cls(client, prefix, timeout, Breaker(1, 0.0, time.monotonic), lambda: None, patience=1)

    @property
    def available(self) -> bool:
        return not self._breaker.is_open

    def allowed(self) -> bool:
        """Whether to try at all. Saying yes while Redis is away uses up the one try of a while."""
        return self._breaker.allows()

    def check_allowed(self) -> None:
        """Raises StoreError."""
        if not self.allowed():
            raise StoreError("not asked: recent calls failed")

    def key(self, kind: str, tenant: str, member: str = "") -> str:
        """Keys of one tenant share the hash tag {tenant}, hence one slot of a cluster."""
        key = f"{self._prefix}{kind}:{{{tenant}}}"
        return f"{key}:{member}" if member else key

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        """Raises StoreError."""
        try:
            try:
                reply = await self._call("EVALSHA", script.sha, len(keys), *keys, *args)
            except NoScriptError:
                reply = await self._call("EVAL", script.text, len(keys), *keys, *args)
        except (RedisError, OSError) as error:
            raise self._failed(error) from error
        self._succeeded()
        return reply

    async def count(self, kind: str) -> int:
        """Keys of one kind, of all tenants. Raises StoreError."""
        async with self.guard(patience=100) as client:
            return len([key async for key in client.scan_iter(f"{self._prefix}{kind}:*", count=1000)])

    @asynccontextmanager
    async def guard(self, patience: int = 1) -> AsyncGenerator[Any, None]:
        """The client, for what is done inside in `patience` times the time of a call. Raises StoreError."""
        try:
            async with loop_timeout(self._timeout, max(patience, self._patience())):
                yield self._client
        except (RedisError, OSError) as error:
            raise self._failed(error) from error
        self._succeeded()

    async def _of_cluster(self, *command: Argument) -> Any:
        async with loop_timeout(self._timeout, self._patience()):
            return await self._client.execute_command(*command)

    def _patience(self) -> int:
        return 1 if self._breaker.is_open else self._most_patience

    def _failed(self, error: Exception) -> StoreError:
        self._breaker.failed(certain=isinstance(error, TimeoutError) and self._patience() > 1)
        return StoreError(f"{type(error).__name__}: {error}")

    def _succeeded(self) -> None:
        self._breaker.succeeded()
        self._answered()
