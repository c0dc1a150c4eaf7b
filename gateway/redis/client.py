"""Calls to Redis with a bounded duration, and the circuit breaker that skips calls after repeated failures."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import resources
from typing import Any, Self

from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.exceptions import NoScriptError, RedisClusterException, RedisError

from gateway.core.breaker import Breaker
from gateway.redis.pipeline import Attempts, Pipeline, loop_timeout
from gateway.redis.states import answer_of

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
        return answer_of(self.__cause__) or "it gives no answer"

    @property
    def is_refusal(self) -> bool:
        """True if Redis answered with an error, and did nothing in that attempt."""
        return bool(answer_of(self.__cause__))


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


PROBE = Script.load("probe.lua", package="gateway.redis")


class RedisCalls:
    """Calls of one component of the gateway to one Redis server or cluster, with keys below `prefix`. They report
    outcomes to the circuit breaker; only `allowed` and `check_allowed` ask whether it is open."""

    # After a failure, one success does not mean that Redis serves: a replica, or a server without memory, answers what
    # only reads. So the breaker hears of a success only once a probe has succeeded too.
    def __init__(
        self,
        client: Redis | RedisCluster,
        prefix: str,
        timeout: float,
        breaker: Breaker | None,
        answered: Callable[[], None] = lambda: None,
        timeout_factor: int = TIMEOUT_FACTOR,
    ) -> None:
        """Args:
        timeout: seconds for a call while the breaker is open, which probes whether Redis is back.
        breaker: None means that no call is ever stopped.
        answered: called after every success, unless Redis is in doubt.
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
        self._in_doubt = False
        """True after a failure, until a probe succeeds."""
        self._probing = asyncio.Lock()

    @classmethod
    def without_breaker(cls, client: Redis | RedisCluster, prefix: str, timeout: float) -> Self:
        """Create calls that no breaker ever stops, for callers with no substitute for Redis. Each may take `timeout`
        seconds."""
        return cls(client, prefix, timeout, None, timeout_factor=1)

    @property
    def available(self) -> bool:
        return self._breaker is None or not self._breaker.is_open

    def allowed(self) -> bool:
        """Return whether the circuit breaker allows a call to Redis now. While the breaker is open, it allows one call
        per cooldown, so each True uses up that probe."""
        return self._breaker is None or self._breaker.allows()

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
        """Run a Lua script, sent only if Redis does not know its digest, and return the reply. The breaker is told and
        not asked; `attempts` learns of repeats. Raises StoreError."""
        try:
            reply = await self._run(script, keys, args, attempts or Attempts())
        except FAILURES as error:
            raise self._failed(error) from error
        await self._succeeded()
        return reply

    async def trouble(self) -> str:
        """Probe whether Redis serves all calls of the limiter now. Return why it does not, as `StoreError.trouble`
        does; empty if it does."""
        try:
            await self._run(PROBE, [self.key("probe", "")], (), Attempts())
        except FAILURES as error:
            failure = self._failed(error)
            failure.__cause__ = error
            return failure.trouble
        self._in_doubt = False
        self._heard()
        return ""

    async def count(self, kind: str) -> int:
        """Return the number of keys of one kind over all tenants, found by scanning the whole key space, which may take
        100 times the usual timeout. Raises StoreError."""
        async with self.guard(timeout_factor=100) as client:
            return len([key async for key in client.scan_iter(f"{self._prefix}{kind}:*", count=1000)])

    @asynccontextmanager
    async def guard(self, timeout_factor: int = 1) -> AsyncGenerator[Any, None]:
        """Yield the Redis client for any commands, within `timeout` times the larger of `timeout_factor` and that of
        other calls, and report to the breaker. Raises StoreError if the body is late or raises one of FAILURES."""
        try:
            async with loop_timeout(self._timeout, max(timeout_factor, self._timeout_factor())):
                yield self._client
        except FAILURES as error:
            raise self._failed(error) from error
        await self._succeeded()

    async def _run(self, script: Script, keys: Sequence[str], args: Sequence[Argument], attempts: Attempts) -> Any:
        try:
            return await self._call("EVALSHA", script.sha, len(keys), *keys, *args, attempts=attempts)
        except NoScriptError:
            return await self._call("EVAL", script.text, len(keys), *keys, *args, attempts=attempts)

    async def _of_cluster(self, *command: Argument, attempts: Attempts) -> Any:
        attempts.repeated = True  # the client of a cluster repeats calls by itself
        async with loop_timeout(self._timeout, self._timeout_factor()):
            return await self._client.execute_command(*command)

    def _timeout_factor(self) -> int:
        return self._max_timeout_factor if self.available else 1

    def _failed(self, error: Exception) -> StoreError:
        if self._breaker is not None:
            self._in_doubt = True
            self._breaker.failed(certain=isinstance(error, TimeoutError) and self._timeout_factor() > 1)
        return StoreError(f"{type(error).__name__}: {answer_of(error) or error}")

    async def _succeeded(self) -> None:
        if not self._in_doubt:
            self._heard()
        elif not self._probing.locked():
            async with self._probing:
                await self.trouble()

    def _heard(self) -> None:
        if self._breaker is not None:
            self._breaker.succeeded()
        self._answered()
