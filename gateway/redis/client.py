"""Calls to Redis with a bounded duration, and the circuit breaker that skips calls after repeated failures."""

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
from redis.exceptions import NoScriptError, RedisClusterException, RedisError, ResponseError

from gateway.core.breaker import Breaker
from gateway.redis.pipeline import Attempts, Pipeline, loop_timeout

Argument = str | int | bytes
FAILURES = (RedisError, RedisClusterException, OSError)
"""Exceptions that mean that Redis did not answer, or answered with an error. RedisClusterException, which a cluster
without a reachable node raises, is no RedisError."""

TIMEOUT_FACTOR = 20
"""Factor on the usual timeout of a call while the circuit breaker is closed: with a timeout of 50 ms, it makes 1 s.

A Redis that is slow because the machine is busy must not count as unavailable, because gateways then limit by
themselves and together admit more: beside six busy processes, one round of six admitted twice its limit when every call
had 50 ms. A server that is gone refuses connections and is noticed at once; one that does not respond costs the running
requests this second, once.
"""


class StoreError(Exception):
    """Redis failed or did not answer in time, or the call was not made because the circuit breaker is open."""

    @property
    def trouble(self) -> str:
        """Why Redis does not serve, for callers without a key: what it answered, such as `MISCONF ...` if it cannot
        write its file, or that it gives no answer, without its address."""
        return str(self.__cause__) if isinstance(self.__cause__, ResponseError) else "it gives no answer"

    @property
    def is_refusal(self) -> bool:
        """True if Redis answered with an error, and did nothing in that attempt."""
        return isinstance(self.__cause__, ResponseError)


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script with the SHA-1 digest by which Redis identifies it. `load` joins resource files of a package."""

    text: str
    sha: str

    @classmethod
    def load(cls, *names: str, package: str = "gateway.limiter") -> Script:
        folder = resources.files(package)
        text = "\n".join((folder / name).read_text(encoding="utf-8") for name in names)
        return cls.of(text)

    @classmethod
    def of(cls, text: str) -> Script:
        return cls(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())

    def __add__(self, rest: Script) -> Script:
        """Return this script, which defines functions, followed by one that uses them."""
        return Script.of(f"{self.text}\n{rest.text}")


class RedisCalls:
    """Calls of one component of the gateway to one Redis server or cluster. Every key begins with `prefix`. Calls
    report their outcomes to the circuit breaker; only `allowed` and `check_allowed` ask whether it is open."""

    def __init__(
        self,
        client: Redis | RedisCluster,
        prefix: str,
        timeout: float,
        breaker: Breaker,
        answered: Callable[[], None],
        timeout_factor: int = TIMEOUT_FACTOR,
    ) -> None:
        """
        Args:
            timeout: seconds for a call while the breaker is open; such a call probes whether Redis is back.
            answered: called without arguments after every call that succeeds.
            timeout_factor: factor on `timeout` while the breaker is closed.
        """
        self._client: Any = client
        # A cluster has many connections, and its client knows which one serves a key.
        self._call = (
            self._of_cluster
            if isinstance(client, RedisCluster)
            else Pipeline(client, timeout, self._timeout_factor).call
        )
        self._prefix = prefix
        self._timeout = timeout
        self._max_timeout_factor = timeout_factor
        self._breaker = breaker
        self._answered = answered

    @classmethod
    def without_breaker(cls, client: Redis | RedisCluster, prefix: str, timeout: float) -> Self:
        """Create calls that no breaker ever stops, for callers with no substitute for Redis. Each may take `timeout`
        seconds."""
        return cls(client, prefix, timeout, Breaker(1, 0.0, time.monotonic), lambda: None, timeout_factor=1)

    @property
    def available(self) -> bool:
        return not self._breaker.is_open

    def allowed(self) -> bool:
        """Return whether the circuit breaker allows a call to Redis now. While the breaker is open, it allows one call
        per cooldown, so each True uses up that probe."""
        return self._breaker.allows()

    def check_allowed(self) -> None:
        """Raise StoreError if the circuit breaker allows no call now. Like `allowed`, uses up an open breaker's
        probe."""
        if not self.allowed():
            raise StoreError("not asked: recent calls failed")

    def key(self, kind: str, tenant: str, member: str = "") -> str:
        """Return the Redis key `PREFIX KIND:{TENANT}` (without the space), followed by `:MEMBER` if `member` is given.
        Keys of one tenant share the hash tag {tenant}, and so one slot of a cluster."""
        key = f"{self._prefix}{kind}:{{{tenant}}}"
        return f"{key}:{member}" if member else key

    async def run(
        self, script: Script, keys: Sequence[str], args: Sequence[Argument], attempts: Attempts | None = None
    ) -> Any:
        """Run a Lua script on `keys` with `args` and return Redis's reply. The text is sent only if Redis does not know
        the digest. Raises StoreError. The outcome is reported to the breaker, which is not asked before. `attempts`
        learns whether the call was repeated."""
        attempts = attempts or Attempts()
        try:
            try:
                reply = await self._call("EVALSHA", script.sha, len(keys), *keys, *args, attempts=attempts)
            except NoScriptError:
                reply = await self._call("EVAL", script.text, len(keys), *keys, *args, attempts=attempts)
        except FAILURES as error:
            raise self._failed(error) from error
        self._succeeded()
        return reply

    async def count(self, kind: str) -> int:
        """Return the number of keys of one kind over all tenants, found by scanning the whole key space, which may take
        100 times the usual timeout. Raises StoreError."""
        async with self.guard(timeout_factor=100) as client:
            return len([key async for key in client.scan_iter(f"{self._prefix}{kind}:*", count=1000)])

    @asynccontextmanager
    async def guard(self, timeout_factor: int = 1) -> AsyncGenerator[Any, None]:
        """Yield the Redis client for any commands, with a time limit on the body: `timeout` times the larger of
        `timeout_factor` and the present factor of other calls. On exit, report the outcome to the breaker. Raises
        StoreError if the body takes longer or raises one of FAILURES."""
        try:
            async with loop_timeout(self._timeout, max(timeout_factor, self._timeout_factor())):
                yield self._client
        except FAILURES as error:
            raise self._failed(error) from error
        self._succeeded()

    async def _of_cluster(self, *command: Argument, attempts: Attempts) -> Any:
        attempts.repeated = True  # the client of a cluster repeats calls by itself
        async with loop_timeout(self._timeout, self._timeout_factor()):
            return await self._client.execute_command(*command)

    def _timeout_factor(self) -> int:
        return 1 if self._breaker.is_open else self._max_timeout_factor

    def _failed(self, error: Exception) -> StoreError:
        self._breaker.failed(certain=isinstance(error, TimeoutError) and self._timeout_factor() > 1)
        return StoreError(f"{type(error).__name__}: {error}")

    def _succeeded(self) -> None:
        self._breaker.succeeded()
        self._answered()
