"""What the audit log shows of the objects that administrators change: their fields before and after a change."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec
import structlog
from msgspec import Struct

from gateway.accounts.admin import shown_admin, shown_tenant
from gateway.accounts.keys import shown_key
from gateway.accounts.record import AccountRecord
from gateway.core.errors import ApiError
from gateway.limiter.admin import LimitAdmin, scope_of
from gateway.services import Services

log = structlog.get_logger("audit")

Names = Mapping[str, str]
"""Names in a call: of its path, its query and its body."""
Fields = dict[str, Any]
NAMED_BY: Mapping[str, tuple[str, ...]] = {
    "keys": ("id",),
    "limits": ("tenant", "key", "adapter"),
    "adapters": ("name", "lora_name"),
    "engines": ("engine", "name"),
    "gateways": ("gateway",),
    "lanes": ("lane",),
    "batches": ("tenant", "batch_id"),
    "requests": ("id",),
}
"""Names that identify an object, by its noun. All others have a `name` or an `id`."""
TIMES = ("created", "updated")


def object_name(noun: str, names: Names) -> str:
    """Return how the audit log names an object, as `tenants/acme`."""
    parts = [names[name] for name in NAMED_BY.get(noun, ("name", "id")) if names.get(name)]
    return "/".join([noun, *parts])


class Views:
    """Looks at objects for the audit log."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._views: Mapping[str, Callable[[Names], Awaitable[Fields | None]]] = {
            "tenants": self._tenant,
            "keys": self._key,
            "admins": self._admin,
            "limits": self._limits,
            "adapters": self._adapter,
            "engines": self._engine,
            "lanes": self._lane,
            "batches": self._batch,
        }

    async def look(self, noun: str, names: Names) -> Fields:
        """Return the fields of an object as they are now; none if it does not exist or cannot be asked. Does not fail:
        the change that is recorded may have been made already."""
        view = self._views.get(noun)
        try:
            return (await view(names) if view else None) or {}
        except ApiError:
            return {}
        except Exception:
            log.exception("audit_view_failed", noun=noun)
            return {}

    async def _tenant(self, names: Names) -> Fields | None:
        return account_fields(self._services.accounts.tenant(names.get("name", "")))

    async def _key(self, names: Names) -> Fields | None:
        return account_fields(self._services.accounts.key(names.get("id", "")))

    async def _admin(self, names: Names) -> Fields | None:
        return account_fields(self._services.accounts.administrators.get(names.get("name", "")))

    async def _limits(self, names: Names) -> Fields | None:
        scope = scope_of(names.get("tenant", ""), names.get("key", ""), names.get("adapter", ""))
        if scope.key:
            scope = replace(scope, key=self._services.accounts.counts_as(scope.key))
        entries = await LimitAdmin(self._services.gateway.limiter).get(scope.tenant)
        return next((entry.limits.set_values() for entry in entries if entry.scope == scope), None)

    async def _adapter(self, names: Names) -> Fields | None:
        name = names.get("name") or names.get("lora_name", "")
        record = self._services.gateway.adapters.of(name).records.get(name)
        if record is None:
            return None
        known = ("source", "version", "tenants", "aliases", "pinned", "own_template")
        return {field: msgspec.to_builtins(getattr(record, field)) for field in known}

    async def _engine(self, names: Names) -> Fields | None:
        name = names.get("engine") or names.get("name", "")
        overviews = self._services.operations.engines(names.get("model", ""))
        known = ("address", "state", "life", "added_by", "role", "base_model")
        found = (overview for overview in overviews if overview.name == name)
        return next(({field: getattr(overview, field) for field in known} for overview in found), None)

    async def _lane(self, names: Names) -> Fields | None:
        operations = self._services.operations
        operations.forget()
        lanes = await operations.lanes(names.get("model", ""))
        return {f"mode of {lane.model}": lane.mode for lane in lanes if lane.lane == names.get("lane")}

    async def _batch(self, names: Names) -> Fields | None:
        found = await self._services.batches.of_tenant(names.get("tenant", ""))
        return next(({"status": batch.status} for batch in found if batch.id == names.get("batch_id")), None)


def account_fields(account: AccountRecord) -> Fields:
    """Return the fields of a tenant, a tenant's key or an administrator; none of a stripped record."""
    shown: Struct
    if account.is_stripped:
        return {}
    if account.admin is not None:
        shown = shown_admin(account)
    else:
        shown = shown_tenant(account) if account.tenant is not None else shown_key(account)
    fields: Fields = msgspec.to_builtins(shown)
    return {name: value for name, value in fields.items() if name not in TIMES}


def account_object(account: AccountRecord) -> str:
    """Return how the audit log names a tenant, a tenant's key or an administrator."""
    if account.key is not None:
        return f"keys/{account.key_id}"
    kind, _, name = account.name.partition("/")
    return f"{kind}s/{name}"


def changed_fields(before: Fields, after: Fields) -> tuple[Fields, Fields]:
    """Return the fields that differ, as they were and as they are."""
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return ({name: before[name] for name in names if name in before}, {n: after[n] for n in names if n in after})
