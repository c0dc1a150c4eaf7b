"""Resolves the model names in a request to an adapter or the base model. An unknown name is an error: it never falls
back to the base model."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec import Struct, field

from gateway.core.errors import invalid_request, model_not_found
from gateway.core.tenants import Tenant


class ModelQuery(Struct, frozen=True):
    """The fields of a request that name a model."""

    model: str
    adapter_id: str | None = None
    """Name of an adapter, in LoRAX's field."""
    lora_path: str | None = None
    """Name of a registered adapter, in SGLang's field. Despite the field's name, it is not a path."""


class Catalog(Struct, frozen=True):
    """Snapshot of the model names that are valid when a request is resolved."""

    bases: tuple[str, ...]
    """Names of the base model, the canonical one first."""
    adapters: Collection[str]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Adapter names by alias."""
    tenants: Mapping[str, Collection[str]] = field(default_factory=dict)
    """Names of permitted tenants by adapter. An adapter that is missing here is not restricted."""

    def permits(self, tenant: Tenant, adapter: str) -> bool:
        """Return whether a tenant may use an adapter: its configuration allows it, and the adapter is not restricted to
        other tenants."""
        return tenant.may_use(adapter) and tenant.name in self.tenants.get(adapter, (tenant.name,))

    def adapter(self, name: str) -> str | None:
        """Return the name of the adapter that has this name or alias. None means that there is no such adapter."""
        name = self.aliases.get(name, name)
        return name if name in self.adapters else None


def resolve(query: ModelQuery, catalog: Catalog, tenant: Tenant) -> str | None:
    """Return the name of the adapter that serves a request. None means the base model: no field names an adapter.

    Raises:
        ApiError: MODEL_NOT_FOUND, a name is unknown or not permitted to this tenant; INVALID_REQUEST, two fields name
            different adapters.
    """
    adapter = _from_model(query.model, catalog, tenant)
    for param in ("adapter_id", "lora_path"):
        name = getattr(query, param)
        if not name:
            continue
        named = _permitted(name, name, catalog, tenant)
        if adapter not in (None, named):
            message = f"{param} names the adapter {name!r}, but the request already names {adapter!r}"
            raise invalid_request(message, param)
        adapter = named
    return adapter


def _from_model(model: str, catalog: Catalog, tenant: Tenant) -> str | None:
    if catalog.adapter(model) is not None:
        return _permitted(model, model, catalog, tenant)
    base, colon, suffix = model.rpartition(":")
    if colon and base in catalog.bases:
        return _permitted(suffix, model, catalog, tenant)
    if model in catalog.bases:
        return None
    raise model_not_found(model)


def _permitted(name: str, asked: str, catalog: Catalog, tenant: Tenant) -> str:
    """Return the name of the adapter with this name or alias, if the tenant may use it. Raises ApiError:
    MODEL_NOT_FOUND, whose message quotes `asked`, the name as the request spelled it."""
    adapter = catalog.adapter(name)
    if adapter is None or not catalog.permits(tenant, adapter):
        raise model_not_found(asked)
    return adapter
