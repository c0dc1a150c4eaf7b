"""Operators' changes of tenants, used by all protocols: the fields are checked, then written to the registry."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from engine.core.messages.requests import Lane
from gateway.accounts.record import AccountRecord
from gateway.accounts.registry import AccountRegistry
from gateway.api_schema import accounts as api
from gateway.core.errors import invalid_request
from gateway.core.lanes import lane_name
from gateway.core.limits import NO_LIMITS
from gateway.core.tenants import RequestClass, Tenant

LANE_FIELDS = ("default_lane", "highest_lane")
PATTERN_FIELDS = ("adapters", "upstreams")
LIMIT_FIELDS = ("limits", "key_limits", "adapter_limits")


class AccountAdmin:
    """Changes tenants for operators. Methods raise ApiError: INVALID_REQUEST, and those of `AccountRegistry`."""

    def __init__(self, accounts: AccountRegistry, drop_limits: Callable[[str], Awaitable[None]]) -> None:
        """`drop_limits` deletes the limits of the tenant that it is called with. It is called after a tenant is
        deleted, so that a new one of the same name does not inherit them."""
        self.accounts = accounts
        self._drop_limits = drop_limits

    async def create(self, name: str, fields: Mapping[str, Any]) -> AccountRecord:
        """Create a tenant and return its record. `fields` are those of `Tenant`, lanes by name and limits as
        mappings."""
        return await self.accounts.create(changed_tenant(_named(name), fields))

    async def change(self, name: str, fields: Mapping[str, Any]) -> AccountRecord:
        """Change the given fields of a tenant and return its record. Limits are refused (INVALID_REQUEST), because they
        have an administration of their own, and so is an empty mapping."""
        for field in LIMIT_FIELDS:
            if field in fields:
                raise invalid_request(f"{field} of a tenant that exists are set by the administration of limits", field)
        if not fields:
            raise invalid_request("there is nothing to change")
        return await self.accounts.amend(name, lambda tenant: changed_tenant(tenant, fields))

    async def delete(self, name: str) -> int:
        """Delete a tenant with its keys and limits. Return the number of deleted keys. Raises LIMITER_UNAVAILABLE, too,
        if the limits stay because Redis is away."""
        count = await self.accounts.delete(name)
        await self._drop_limits(name)
        return count


def _named(name: str) -> Tenant:
    try:
        return Tenant(name)
    except ValueError as error:
        raise invalid_request(str(error), "name") from error


def changed_tenant(tenant: Tenant, fields: Mapping[str, Any]) -> Tenant:
    values = dict(fields)
    try:
        for field in LANE_FIELDS:
            if field in values:
                values[field] = _lane(values[field], field)
        for field in LIMIT_FIELDS:
            if field in values:
                values[field] = NO_LIMITS.changed(values[field])
        for field in PATTERN_FIELDS:
            if field in values:
                values[field] = tuple(values[field])
        if "classes" in values:
            values["classes"] = {name: RequestClass(**settings) for name, settings in values["classes"].items()}
        return replace(tenant, **values)
    except (ValueError, TypeError) as error:
        raise invalid_request(str(error), next(iter(fields), None)) from error


def _lane(name: str, field: str) -> Lane:
    lanes = {lane_name(lane): lane for lane in Lane}
    if name not in lanes:
        raise invalid_request(f"{field} must be one of {', '.join(lanes)}", field)
    return lanes[name]


def shown_tenant(account: AccountRecord) -> api.Tenant:
    """Return a tenant's record as operators see it."""
    tenant = account.tenant
    assert tenant is not None, "a tenant's record"
    return api.Tenant(
        name=tenant.name,
        default_lane=lane_name(tenant.default_lane),
        highest_lane=lane_name(tenant.highest_lane),
        adapters=list(tenant.adapters),
        upstreams=list(tenant.upstreams),
        weight=tenant.weight,
        unknown_fields=tenant.unknown_fields,
        classes={name: api.RequestClass(**asdict(settings)) for name, settings in tenant.classes.items()},
        disabled=account.disabled,
        created=account.created,
        updated=account.updated,
    )


def shown_key(account: AccountRecord) -> api.Key:
    """Return an API key's record as operators see it, without its secret."""
    owner = account.key
    assert owner is not None, "a key's record"
    return api.Key(
        id=account.key_id,
        tenant=owner.tenant,
        label=owner.label,
        counts_as=account.counts_as,
        disabled=account.disabled,
        created=account.created,
        updated=account.updated,
    )
