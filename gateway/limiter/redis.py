"""Limits shared by every gateway, in Redis or Valkey: one script a call, so every decision is atomic.

Keys of one tenant share the hash tag {tenant}, hence one slot of a cluster; `*` is the configured prefix:

    *limits:{tenant}          hash   published limits and their source, config or live
    *limits:{tenant}:key      hash   limits set live for one key
    *bucket:{tenant}[:key]    hash   what is in use
    *lease:{tenant}:id        hash   a reservation that is not settled yet; expires by itself
    *void:{tenant}:id         text   a reservation given back before it arrived; expires by itself
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError

from gateway.core.budget import Bucket, Meter
from gateway.core.tenants import Limits, Tenant
from gateway.limiter.base import Grant, ReserveRequest, refused
from gateway.limiter.breaker import Breaker

ADMITTED, UNPUBLISHED = 1, -1
MAX_OWED = 65_536


class StoreError(Exception):
    """Redis did not answer in time, answered with an error of its own, or is not being asked for a moment."""


@dataclass(frozen=True, slots=True)
class Script:
    """Lua with the digest Redis knows it by."""

    text: str
    sha: str

    @classmethod
    def load(cls, *names: str) -> Script:
        folder = resources.files("gateway.limiter")
        text = "\n".join((folder / name).read_text(encoding="utf-8") for name in names)
        return cls(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


@dataclass(frozen=True, slots=True)
class Correction:
    """A settlement: what a reservation came to."""

    grant: Grant
    requests: int
    tokens: int
    uncertain: bool = False
    """Whether the reservation was made is not known, nor whether it may yet arrive."""


class RedisLimiter:
    """Reserves and settles in Redis; raises StoreError where a caller needs an answer and there is none.

    Settlements never raise: what cannot be delivered is kept and sent when Redis answers again.
    """

    def __init__(
        self,
        client: Redis,
        *,
        timeout: float = 0.05,
        lease_seconds: float = 3600.0,
        prefix: str = "loralane:",
        threshold: int = 3,
        cooldown: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`timeout`, `cooldown`, `lease_seconds`: seconds. `threshold`: failures in a row that open the circuit."""
        self._client = client
        self._timeout = timeout
        self._lease_ms = int(lease_seconds * 1000)
        self._prefix = prefix
        self._breaker = Breaker(threshold, cooldown, clock)
        self._reserve_script = Script.load("bucket.lua", "reserve.lua")
        self._settle_script = Script.load("bucket.lua", "settle.lua")
        self._configure_script = Script.load("configure.lua")
        self._tenants: dict[str, Tenant] = {}
        self._unpublished: set[str] = set()
        self._owed: deque[Correction] = deque(maxlen=MAX_OWED)
        self._delivery: asyncio.Task[None] | None = None

    @property
    def available(self) -> bool:
        return not self._breaker.is_open

    async def reserve(self, request: ReserveRequest) -> Grant:
        """Raises ApiError (429) or StoreError."""
        self._check_open()
        grant = Grant(f"{request.request_id}.{secrets.token_hex(6)}", request, "redis")
        try:
            admitted, buckets = await self._ask(grant)
        except (StoreError, asyncio.CancelledError):
            self._owed.append(Correction(grant, 0, 0, uncertain=True))
            if self.available:
                self._deliver_soon()
            raise
        if not admitted:
            raise refused(request, buckets)
        return replace(grant, buckets=buckets)

    async def settle(self, grant: Grant, actual_tokens: int) -> None:
        await self._correct(Correction(grant, 1, actual_tokens))

    async def refund(self, grant: Grant) -> None:
        await self._correct(Correction(grant, 0, 0))

    async def configure(self, tenants: Iterable[Tenant]) -> None:
        """Raises StoreError; limits not published now are published before a tenant's next reservation."""
        self._tenants = {tenant.name: tenant for tenant in tenants}
        self._unpublished = set(self._tenants)
        for name in tuple(self._tenants):
            await self._publish(name)

    async def limits(self, tenant: str, key_id: str | None = None) -> Limits:
        """Raises StoreError."""
        async with self._guard():
            own = await self._read_limits(self._key("limits", tenant, key_id), "")
            if own is None and key_id is not None:
                own = await self._read_limits(self._key("limits", tenant), "key_")
        return own or Limits()

    async def set_limits(self, tenant: str, limits: Limits | None, key_id: str | None = None) -> None:
        """Raises StoreError: a change that was not made is never reported as made."""
        self._check_open()
        if limits is None and key_id is None:
            await self._publish(tenant, replace_live=True)
        elif limits is None:
            async with self._guard():
                await self._client.delete(self._key("limits", tenant, key_id))
        else:
            fields = _fields(limits) if key_id else _fields(limits) + self._key_fields(tenant)
            await self._run(self._configure_script, [self._key("limits", tenant, key_id)], ["live", 1, *fields])

    async def outstanding(self) -> int:
        """Raises StoreError."""
        count, cursor = 0, -1
        while cursor != 0:
            async with self._guard():
                cursor, keys = await self._client.scan(max(cursor, 0), f"{self._prefix}lease:*", 1000)
            count += len(keys)
        return count

    async def ping(self) -> bool:
        try:
            async with self._guard():
                await self._client.ping()
        except StoreError:
            return False
        return True

    async def close(self) -> None:
        """Sends what is still owed, if Redis answers. The client belongs to whoever made it."""
        if self._delivery is not None:
            await self._delivery
        await self._deliver()

    async def _ask(self, grant: Grant) -> tuple[bool, tuple[Bucket, ...]]:
        request = grant.request
        if request.tenant in self._unpublished:
            await self._publish(request.tenant)
        keys, args = self._keys(grant), [request.tokens, self._lease_ms]
        reply = await self._run(self._reserve_script, keys, args)
        if reply[0] == UNPUBLISHED:
            await self._publish(request.tenant)
            reply = await self._run(self._reserve_script, keys, args)
        now = int(reply[1])
        return reply[0] == ADMITTED, tuple(_bucket(reply[first : first + 4], now) for first in (2, 6))

    async def _publish(self, tenant: str, *, replace_live: bool = False) -> None:
        configured = self._tenants.get(tenant)
        fields = _fields(configured.limits if configured else Limits()) + self._key_fields(tenant)
        args = ["config", int(replace_live), *fields]
        await self._run(self._configure_script, [self._key("limits", tenant)], args)
        self._unpublished.discard(tenant)

    async def _correct(self, correction: Correction) -> None:
        if not self._breaker.allows():
            self._owed.append(correction)
            return
        with suppress(StoreError):
            await self._send(correction)

    async def _send(self, correction: Correction) -> None:
        """What fails stays owed. Sending one twice does no harm: the first counts."""
        args = [correction.tokens, correction.requests, int(correction.uncertain)]
        try:
            await self._run(self._settle_script, self._keys(correction.grant), args)
        except (StoreError, asyncio.CancelledError):
            self._owed.append(correction)
            raise

    async def _deliver(self) -> None:
        """Sends what is owed until nothing is, or Redis is away again."""
        with suppress(StoreError):
            while self._owed:
                await self._send(self._owed.popleft())

    async def _run(self, script: Script, keys: Sequence[str], args: Sequence[str | int]) -> Any:
        async with self._guard():
            try:
                return await self._client.evalsha(script.sha, len(keys), *keys, *args)
            except NoScriptError:
                return await self._client.eval(script.text, len(keys), *keys, *args)

    @asynccontextmanager
    async def _guard(self) -> AsyncGenerator[None, None]:
        """Bounds what is done inside by the timeout and tells the breaker how it went."""
        try:
            async with asyncio.timeout(self._timeout):
                yield
        except (RedisError, OSError) as error:
            self._breaker.failed()
            raise StoreError(f"{type(error).__name__}: {error}") from error
        self._breaker.succeeded()
        self._deliver_soon()

    def _deliver_soon(self) -> None:
        if self._owed and (self._delivery is None or self._delivery.done()):
            self._delivery = asyncio.create_task(self._deliver())

    def _check_open(self) -> None:
        if not self._breaker.allows():
            raise StoreError("not asked: recent calls failed")

    def _keys(self, grant: Grant) -> list[str]:
        tenant, key_id = grant.request.tenant, grant.request.key_id
        scopes = [self._key(kind, tenant, key) for key in (None, key_id) for kind in ("limits", "bucket")]
        return [self._key("lease", tenant, grant.lease), *scopes, self._key("void", tenant, grant.lease)]

    def _key(self, kind: str, tenant: str, member: str | None = None) -> str:
        key = f"{self._prefix}{kind}:{{{tenant}}}"
        return key if member is None else f"{key}:{member}"

    def _key_fields(self, tenant: str) -> list[str | int]:
        configured = self._tenants.get(tenant)
        return _fields(configured.key_limits, "key_") if configured else []

    async def _read_limits(self, key: str, field_prefix: str) -> Limits | None:
        names = [f"{field_prefix}requests_per_minute", f"{field_prefix}tokens_per_minute", "source"]
        requests, tokens, source = await self._client.hmget(key, names)
        return Limits(_whole(requests), _whole(tokens)) if source else None


def _fields(limits: Limits, prefix: str = "") -> list[str | int]:
    """Field and value pairs of the limits there are."""
    values = {"requests_per_minute": limits.requests_per_minute, "tokens_per_minute": limits.tokens_per_minute}
    return [item for name, value in values.items() if value is not None for item in (f"{prefix}{name}", value)]


def _bucket(reply: Sequence[bytes], now: int) -> Bucket:
    request_limit, requests, token_limit, tokens = reply
    return Bucket(Meter(_whole(request_limit), float(requests)), Meter(_whole(token_limit), float(tokens)), now)


def _whole(value: bytes | str | None) -> int | None:
    return int(value) if value else None
