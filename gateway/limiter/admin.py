"""Operators' operations on limits, shared by both protocols: they validate arguments and call the limiter."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gateway.core.errors import invalid_request, tenant_not_found
from gateway.core.limits import EACH, NO_LIMITS, Scope
from gateway.limiter.base import Limiter, StoredLimits
from gateway.limiter.usage import ScopeUsage

MAX_MEMBER = 256
"""Maximum length of a key id or an adapter name, in characters."""


class LimitAdmin:
    """Reads and changes limits. Methods raise ApiError: TENANT_NOT_FOUND, and those that change something also
    INVALID_REQUEST for invalid arguments, TENANT_CONFLICT for limits of too many scopes, and LIMITER_UNAVAILABLE while
    Redis is away."""

    def __init__(self, limiter: Limiter, counts_as: Callable[[str], str] = str) -> None:
        """`counts_as` returns the id under which the limits of the key with a given id are kept. The default is for
        keys that are never rotated."""
        self._limiter = limiter
        self._counts_as = counts_as

    async def get(self, tenant: str = "") -> list[StoredLimits]:
        """Return the limits stored for each scope of one tenant, or of all tenants if the name is empty."""
        return [entry for name in self._tenants(tenant) for entry in await self._limiter.entries(name)]

    async def set(self, scope: Scope, changes: Mapping[str, Any]) -> StoredLimits:
        """Change the limits of a scope that `changes` names (fields of `Limits`; None lifts a limit), from the next
        request on every gateway. Return the scope's limits after the change."""
        scope = self._counted(scope)
        if not changes:
            raise invalid_request("there is nothing to change: name a limit")
        try:
            NO_LIMITS.changed(changes)
        except ValueError as error:
            raise invalid_request(str(error), str(error).partition(" ")[0].rstrip(":")) from error
        return StoredLimits(scope, await self._limiter.set_limits(scope, changes), "live")

    async def reset(self, scope: Scope, *, used: bool) -> StoredLimits:
        """Restore a scope's configured limits or, with `used` (INVALID_REQUEST for a scope with EACH), set its counted
        use to zero and keep the limits. Return the limits that are then in force, with their source as `get` has it."""
        scope = self._counted(scope)
        if used and scope.member == EACH:
            raise invalid_request("what is in use is forgotten for one key or adapter, not for each", scope.kind)
        if used:
            await self._limiter.forget_use(scope)
        else:
            await self._limiter.restore_limits(scope)
        sources = {entry.scope: entry.source for entry in await self._limiter.entries(scope.tenant)}
        return StoredLimits(scope, await self._limiter.limits(scope), sources.get(scope, "config"))

    async def usage(self, tenant: str = "") -> list[ScopeUsage]:
        """Return the usage of each scope of one tenant, or of all tenants if the name is empty."""
        return [used for name in self._tenants(tenant) for used in await self._limiter.usage(name)]

    async def watch(
        self, tenant: str, interval_seconds: float, stopping: asyncio.Event, check: Callable[[], None]
    ) -> AsyncGenerator[list[ScopeUsage], None]:
        """Yield the usage of all scopes of a tenant (empty: of all), then, polled every `interval_seconds`, of those
        that have changed, until `stopping` is set. `check` is called before each poll, and raises ApiError if the
        caller must not watch any longer."""
        before: dict[Scope, ScopeUsage] = {}
        first = True
        while not stopping.is_set():
            check()
            now = {used.scope: used for used in await self.usage(tenant)}
            changed = [used for scope, used in now.items() if before.get(scope) != used]
            if first or changed:
                yield changed
            first, before = False, now
            await _wait(stopping, interval_seconds)

    def _counted(self, scope: Scope) -> Scope:
        """Return the scope in which the limits of the given one are kept. Raises ApiError (TENANT_NOT_FOUND)."""
        self._tenants(scope.tenant)
        return replace(scope, key=self._counts_as(scope.key)) if scope.kind == "key" else scope

    def _tenants(self, tenant: str) -> Sequence[str]:
        if tenant and tenant not in self._limiter.tenants:
            raise tenant_not_found(tenant)
        return [tenant] if tenant else self._limiter.tenants


async def _wait(event: asyncio.Event, seconds: float) -> None:
    waiting = asyncio.ensure_future(event.wait())
    await asyncio.wait([waiting], timeout=seconds)
    waiting.cancel()


def scope_of(tenant: str, key: str, adapter: str) -> Scope:
    """Return the scope of a tenant, of one of its keys or of one adapter; an empty `key` or `adapter` means none.
    Raises ApiError: INVALID_REQUEST, for no tenant, both a key and an adapter, or one of over MAX_MEMBER characters."""
    if not tenant:
        raise invalid_request("tenant is required", "tenant")
    if max(len(key), len(adapter)) > MAX_MEMBER:
        raise invalid_request(f"key and adapter must have at most {MAX_MEMBER} characters", "key")
    try:
        return Scope(tenant, key, adapter)
    except ValueError as error:
        raise invalid_request(str(error), "key") from error
