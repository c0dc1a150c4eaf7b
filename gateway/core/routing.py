"""Resolves the model names in a request to a base model and perhaps one of its adapters. An unknown name is an error:
it never falls back to a base model.

A gateway may serve several base models. The name of a base model always means that model, and the name of a virtual
model that one (`gateway.virtual_models`); until a member is chosen, the base model in whose catalog it is stands for
it. An adapter's name or alias means the adapter of the first model, in the order of the configuration, that has it:
where two gateways have given one name to adapters of two models at the same time, every gateway serves the same one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

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
    """Snapshot of the names of one base model and its adapters that are valid when a request is resolved."""

    bases: tuple[str, ...]
    """Names of the base model, the canonical one first."""
    adapters: AbstractSet[str]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Adapter names by alias."""
    tenants: Mapping[str, Collection[str]] = field(default_factory=dict)
    """Names of permitted tenants by adapter. An adapter that is missing here is not restricted."""
    virtual: AbstractSet[str] = frozenset()
    """Names of virtual models that resolve to this base model until their policy has chosen a member."""

    def permits(self, tenant: Tenant, adapter: str) -> bool:
        """Return whether a tenant may use an adapter: its configuration allows it, and the adapter is not restricted to
        other tenants."""
        return tenant.may_use(adapter) and tenant.name in self.tenants.get(adapter, (tenant.name,))

    def adapter(self, name: str) -> str | None:
        """Return the name of the adapter that has this name or alias. None means that there is no such adapter."""
        name = self.aliases.get(name, name)
        return name if name in self.adapters else None

    def knows(self, name: str) -> bool:
        """Return whether the base model, a virtual model that it stands for, or one of its adapters has this name or
        alias."""
        return name in self.bases or name in self.virtual or self.adapter(name) is not None


class Target(NamedTuple):
    """What serves a request: the base model, by its position in the configuration, and its adapter. None means the base
    model without an adapter."""

    model: int
    adapter: str | None


def resolve(query: ModelQuery, catalogs: Sequence[Catalog], tenant: Tenant) -> Target:
    """Return what serves a request. `catalogs` has one catalog for each base model, in the order of the configuration.

    Raises:
        ApiError: MODEL_NOT_FOUND, a name is unknown or not permitted to this tenant; INVALID_REQUEST, two fields name
            different adapters, or an adapter and a model that it does not belong to.
    """
    target = _permitted(find(query.model, catalogs), query.model, catalogs, tenant)
    is_virtual = query.model in catalogs[target.model].virtual
    for param in ("adapter_id", "lora_path"):
        name = getattr(query, param)
        if not name:
            continue
        if is_virtual:
            message = f"{param} cannot be combined with {query.model[:80]!r}, which chooses its members"
            raise invalid_request(message, param)
        named = _permitted(find_adapter(name, catalogs), name, catalogs, tenant)
        if target.adapter not in (None, named.adapter):
            message = f"{param} names the adapter {name[:80]!r}, but the request already names {target.adapter!r}"
            raise invalid_request(message, param)
        if target.model != named.model:
            own, asked = catalogs[named.model].bases[0], catalogs[target.model].bases[0]
            asks = f"the base model {own!r}, but the request names {asked!r}"
            message = f"{param} names the adapter {name[:80]!r} of {asks}"
            raise invalid_request(message, param)
        target = named
    return target


def find(name: str, catalogs: Sequence[Catalog]) -> Target | None:
    """Return what serves the name in the field `model` of a request, for a tenant that may use it: a base model, an
    adapter, or `base:adapter`. None means that the name is unknown."""
    for position, catalog in enumerate(catalogs):
        if name in catalog.bases or name in catalog.virtual:
            return Target(position, None)
    if (target := find_adapter(name, catalogs)) is not None:
        return target
    base, colon, suffix = name.rpartition(":")
    owner, target = _base(base, catalogs) if colon else None, find_adapter(suffix, catalogs)
    return None if owner is None or target is None or target.model != owner else target


def find_adapter(name: str, catalogs: Sequence[Catalog]) -> Target | None:
    """Return the adapter that a name or alias in a request means: that of the first catalog that has the name. None
    means that no adapter has it, that a base or virtual model has it, or that it is an alias of an adapter that is not
    served because an earlier catalog has that adapter's own name."""
    if any(name in catalog.bases or name in catalog.virtual for catalog in catalogs):
        return None
    for position, catalog in enumerate(catalogs):
        if (adapter := catalog.adapter(name)) is not None:
            is_hidden = any(earlier.knows(adapter) for earlier in catalogs[:position])
            return None if is_hidden else Target(position, adapter)
    return None


def _base(name: str, catalogs: Sequence[Catalog]) -> int | None:
    for position, catalog in enumerate(catalogs):
        if name in catalog.bases:
            return position
    return None


def _permitted(target: Target | None, name: str, catalogs: Sequence[Catalog], tenant: Tenant) -> Target:
    """Return the target if there is one and the tenant may use its adapter or virtual model. Raises ApiError:
    MODEL_NOT_FOUND, whose message quotes the `name` of the target."""
    if target is None or (target.adapter is not None and not catalogs[target.model].permits(tenant, target.adapter)):
        raise model_not_found(name)
    if name in catalogs[target.model].virtual and not tenant.may_use(name):
        raise model_not_found(name)
    return target
