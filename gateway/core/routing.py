"""From the names in a request to what serves it. Never the base model in silence."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec import Struct, field

from gateway.core.errors import invalid_request, model_not_found
from gateway.core.tenants import Tenant


class ModelQuery(Struct, frozen=True):
    """What a request says about the model it wants."""

    model: str
    adapter_id: str | None = None
    """LoRAX's field."""
    lora_path: str | None = None
    """SGLang's field. Here too it holds the name of a registered adapter."""


class Catalog(Struct, frozen=True):
    """The names that mean something at this moment."""

    bases: tuple[str, ...]
    """Names of the base model, the canonical one first."""
    adapters: Collection[str]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of adapters."""
    tenants: Mapping[str, Collection[str]] = field(default_factory=dict)
    """Adapters that are for some tenants alone, and for which."""

    def permits(self, tenant: Tenant, adapter: str) -> bool:
        """What a tenant's configuration lets it use, unless the adapter is for others."""
        return tenant.may_use(adapter) and tenant.name in self.tenants.get(adapter, (tenant.name,))

    def adapter(self, name: str) -> str | None:
        name = self.aliases.get(name, name)
        return name if name in self.adapters else None


def resolve(query: ModelQuery, catalog: Catalog, tenant: Tenant) -> str | None:
    """Name of the adapter that serves a request; None: the base model.

    Raises:
        ApiError: MODEL_NOT_FOUND, a name is unknown or not this tenant's; INVALID_REQUEST, two names contradict
            each other.
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
    """The adapter behind a name, for who may use it; `asked`: how the request spelled it."""
    adapter = catalog.adapter(name)
    if adapter is None or not catalog.permits(tenant, adapter):
        raise model_not_found(asked)
    return adapter
