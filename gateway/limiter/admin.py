"""What operators do to limits, in words both protocols translate to: checked, then done to the limiter."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from gateway.core.errors import invalid_request, tenant_not_found
from gateway.core.limits import EACH, NO_LIMITS, Limits, Scope
from gateway.limiter.base import LimitEntry, Limiter
from gateway.limiter.usage import ScopeUsage

MAX_MEMBER = 256
"""Characters of a key's id or an adapter's name."""


class LimitAdmin:
    """Every method raises ApiError: INVALID_REQUEST, TENANT_NOT_FOUND, LIMITER_UNAVAILABLE."""

    def __init__(self, limiter: Limiter) -> None:
        self._limiter = limiter

    async def get(self, tenant: str = "") -> list[LimitEntry]:
        """What is written down for one tenant, or for all of them."""
        return [entry for name in self._tenants(tenant) for entry in await self._limiter.entries(name)]

    async def set(self, scope: Scope, changes: Mapping[str, Any]) -> LimitEntry:
        """Binds on the next request, on every gateway."""
        self._tenants(scope.tenant)
        if not changes:
            raise invalid_request("there is nothing to change: name a limit")
        try:
            NO_LIMITS.changed(changes)
        except ValueError as error:
            raise invalid_request(str(error), str(error).partition(" ")[0].rstrip(":")) from error
        return LimitEntry(scope, await self._limiter.set_limits(scope, changes), "live")

    async def reset(self, scope: Scope, *, used: bool) -> Limits:
        """Returns to the configured limits; or, with `used`, forgets what is in use. Returns what is in force then."""
        self._tenants(scope.tenant)
        if used and scope.member == EACH:
            raise invalid_request("what is in use is forgotten for one key or adapter, not for each", scope.kind)
        if used:
            await self._limiter.forget_use(scope)
        else:
            await self._limiter.restore_limits(scope)
        return await self._limiter.limits(scope)

    async def usage(self, tenant: str = "") -> list[ScopeUsage]:
        """Of one tenant, or of all of them."""
        return [used for name in self._tenants(tenant) for used in await self._limiter.usage(name)]

    async def watch(
        self, tenant: str, interval_seconds: float, stopping: asyncio.Event
    ) -> AsyncGenerator[list[ScopeUsage], None]:
        """All of it once, then what has become different, looked at every `interval_seconds`."""
        before: dict[Scope, ScopeUsage] = {}
        first = True
        while not stopping.is_set():
            now = {used.scope: used for used in await self.usage(tenant)}
            changed = [used for scope, used in now.items() if before.get(scope) != used]
            if first or changed:
                yield changed
            first, before = False, now
            await _wait(stopping, interval_seconds)

    def _tenants(self, asked: str) -> Sequence[str]:
        if asked and asked not in self._limiter.tenants:
            raise tenant_not_found(asked)
        return [asked] if asked else self._limiter.tenants


async def _wait(event: asyncio.Event, seconds: float) -> None:
    waiting = asyncio.ensure_future(event.wait())
    await asyncio.wait([waiting], timeout=seconds)
    waiting.cancel()


def scope_of(tenant: str, key: str, adapter: str) -> Scope:
    """Raises ApiError: INVALID_REQUEST."""
    if not tenant:
        raise invalid_request("tenant is required", "tenant")
    if max(len(key), len(adapter)) > MAX_MEMBER:
        raise invalid_request(f"key and adapter must have at most {MAX_MEMBER} characters", "key")
    try:
        return Scope(tenant, key, adapter)
    except ValueError as error:
        raise invalid_request(str(error), "key") from error
