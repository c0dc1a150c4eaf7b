"""Limits in Redis: they are published from the configuration, changed live, and read by every reservation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import msgspec

from gateway.core.bucket import Bucket
from gateway.core.errors import ApiError, Fault
from gateway.core.limits import EACH, LIMIT_NAMES, LimitName, Limits, Scope, scope_named
from gateway.core.tenants import Tenant
from gateway.limiter.base import StoredLimits
from gateway.limiter.usage import ScopeUsage, usage_of
from gateway.redis.client import RedisCalls, Script, StoreError

MOST_SCOPES = 10_000
"""Maximum number of scopes of a tenant with limits, configured or changed live."""
LOST = "limits were lost as soon as they were published"

_decode_buckets = msgspec.msgpack.Decoder(tuple[Bucket, ...]).decode


class PublishedLimits:
    """Reads and writes limits in Redis, where each tenant has one hash: scope name -> limits and their source (`config`
    or `live`). All async methods raise StoreError if Redis fails."""

    def __init__(self, calls: RedisCalls, receipt_ms: int) -> None:
        """`receipt_ms`: time for which a reservation can be settled, in milliseconds."""
        self._calls = calls
        self._receipt_ms = receipt_ms
        self._tenants: dict[str, Tenant] = {}
        self._unpublished: set[str] = set()
        self._publish_script = Script.load("publish.lua")
        self._change_script = Script.load("change.lua")
        self._usage_script = Script.load("bucket.lua", "usage.lua")
        self._forget_script = Script.load("forget.lua")

    @property
    def tenants(self) -> Sequence[str]:
        return sorted(self._tenants)

    async def configure(self, tenants: Iterable[Tenant]) -> None:
        """Replace the known tenants and publish their limits. After a StoreError, limits that were not published are
        published before the tenant's next reservation."""
        self._tenants = {}
        self.configure_lazily(tenants)
        for name in tuple(self._tenants):
            await self.publish(name)

    def configure_lazily(self, tenants: Iterable[Tenant]) -> None:
        known = {tenant.name: tenant for tenant in tenants}
        changed = {name for name, tenant in known.items() if self._tenants.get(name) != tenant}
        self._unpublished = changed | (self._unpublished & known.keys())
        self._tenants = known

    async def drop(self, tenant: str) -> None:
        """Delete a tenant's limits, buckets and slots. The leases of its running requests stay, so that they can be
        settled, and so does its usage."""
        keys = [self._calls.key(kind, tenant) for kind in ("limits", "scopes")]
        async with self._calls.guard() as client:
            names = [name.decode() for name in await client.smembers(keys[1])]
            keys += [self._calls.key(kind, tenant, name) for name in names for kind in ("bucket", "running")]
            await client.delete(*keys)

    async def ensure(self, tenant: str) -> None:
        if tenant in self._unpublished:
            await self.publish(tenant)

    async def publish(self, tenant: str, restore: str = "") -> None:
        """Write the configured limits of a tenant to Redis, except for scopes whose limits were changed live. `restore`
        names a scope whose live limits are replaced, too."""
        args: list[str | bytes] = [restore]
        args += [item for name, limits in self._configured(tenant) for item in (name, encode_limits(limits, "config"))]
        await self._calls.run(self._publish_script, [self._calls.key("limits", tenant)], args)
        self._unpublished.discard(tenant)

    async def limits(self, scope: Scope) -> Limits:
        await self.ensure(scope.tenant)
        async with self._calls.guard() as client:
            values = await client.hmget(self._calls.key("limits", scope.tenant), list(_names(scope)))
        texts = [text for text in values if text is not None]
        return decode_limits(texts[0])[0] if texts else Limits()

    async def entries(self, tenant: str) -> list[StoredLimits]:
        await self.ensure(tenant)
        async with self._calls.guard() as client:
            values: dict[bytes, bytes] = await client.hgetall(self._calls.key("limits", tenant))
        entries = [_entry(scope_named(tenant, name.decode()), text) for name, text in values.items()]
        return sorted(entries, key=lambda entry: entry.scope.order)

    async def set(self, scope: Scope, changes: Mapping[str, Any]) -> Limits:
        """Change a scope's limits. Raises ApiError (TENANT_CONFLICT) if the tenant has limits for MOST_SCOPES."""
        args: list[str | bytes] = [*_names(scope), msgspec.json.encode(changes), str(MOST_SCOPES)]
        keys = [self._calls.key("limits", scope.tenant)]
        text = await self._calls.run(self._change_script, keys, args)
        if text is None:
            await self.publish(scope.tenant)
            text = await self._calls.run(self._change_script, keys, args)
        if text is None:
            raise StoreError(LOST)
        if not text:
            message = f"tenant {scope.tenant} has limits for {MOST_SCOPES} scopes, the maximum; reset some of them"
            raise ApiError(Fault.TENANT_CONFLICT, message, scope.kind)
        return decode_limits(text)[0]

    async def restore(self, scope: Scope) -> None:
        if scope.member in ("", EACH):
            await self.publish(scope.tenant, restore=scope.name)
        else:
            async with self._calls.guard() as client:
                await client.hdel(self._calls.key("limits", scope.tenant), scope.name)

    async def forget_use(self, scope: Scope) -> None:
        key = self._calls.key("bucket", scope.tenant, scope.name)
        await self._calls.run(self._forget_script, [key], [self._receipt_ms])

    async def usage(self, tenant: str) -> list[ScopeUsage]:
        scopes = await self._scopes(tenant)
        keys = [self._calls.key("limits", tenant), self._calls.key("scopes", tenant)]
        keys += [self._calls.key(kind, tenant, scope.name) for scope in scopes for kind in ("bucket", "running")]
        args = [name for scope in scopes for name in _names(scope)]
        reply, refused, last = await self._calls.run(self._usage_script, keys, args)
        buckets = decode_buckets(reply)
        width = len(LIMIT_NAMES)
        return [
            usage_of(scope, bucket, refused[width * i : width * (i + 1)], _last_refusal(last[i]))
            for i, (scope, bucket) in enumerate(zip(scopes, buckets, strict=True))
        ]

    async def _scopes(self, tenant: str) -> list[Scope]:
        """Return the scopes of a tenant whose use can be shown, sorted by `Scope.order`: the tenant, and keys and
        adapters with limits of their own or a bucket, but not the defaults (EACH)."""
        own_scopes = {entry.scope for entry in await self.entries(tenant)}
        async with self._calls.guard() as client:
            used: set[bytes] = await client.smembers(self._calls.key("scopes", tenant))
        scopes = own_scopes | {scope_named(tenant, name.decode()) for name in used}
        return sorted((scope for scope in scopes if scope.member != EACH), key=attrgetter("order"))

    def _configured(self, tenant: str) -> Iterator[tuple[str, Limits]]:
        known = self._tenants.get(tenant, Tenant(tenant))
        yield Scope(tenant).name, known.limits
        yield Scope(tenant, key=EACH).name, known.key_limits
        yield Scope(tenant, adapter=EACH).name, known.adapter_limits


def encode_limits(limits: Limits, source: str) -> bytes:
    return msgspec.json.encode({**limits.set_values(), "source": source})


def decode_limits(text: bytes) -> tuple[Limits, str]:
    """Parse the JSON of `encode_limits`. Return the limits and their source, `config` or `live`."""
    fields = msgspec.json.decode(text)
    source = fields.pop("source")
    return Limits().changed(fields), source


def decode_buckets(reply: bytes) -> tuple[Bucket, ...]:
    """Decode `reply`, the buckets of a script's reply in msgpack. Raises StoreError if it cannot be decoded, such as
    for tokens of a day beyond 2^63."""
    try:
        return _decode_buckets(reply)
    except msgspec.DecodeError as error:
        raise StoreError(f"a bucket that cannot be read: {error}") from error


def _last_refusal(text: bytes) -> tuple[int, tuple[LimitName, ...]] | None:
    """Parse the last refusal in a script's reply: its time in microseconds since 1970, and the limits that the request
    did not fit. Return None if there was no refusal."""
    if not text:
        return None
    flags, at = text.decode().split()
    return int(float(at)), tuple(name for name, flag in zip(LIMIT_NAMES, flags, strict=True) if flag == "1")


def _names(scope: Scope) -> tuple[str, str]:
    return scope.name, scope.each.name if scope.each else ""


def _entry(scope: Scope, text: bytes) -> StoredLimits:
    limits, source = decode_limits(text)
    return StoredLimits(scope, limits, "live" if source == "live" else "config")
