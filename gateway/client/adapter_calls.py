"""Calls about adapters."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.api_schema import adapters as api
from gateway.api_schema.adapters import AdapterStatus, Reloaded
from gateway.client.call import Call


def adapters() -> Call[list[AdapterStatus]]:
    """Return all adapters, with their tiers, sizes and use."""
    return Call.of(api.LIST, field="adapters")


def adapter(name: str) -> Call[AdapterStatus]:
    """Return one adapter."""
    return Call.of(api.GET, name)


def load_adapter(
    name: str,
    source: str,
    *,
    base_model: str = "",
    replace: bool = False,
    tenants: Sequence[str] = (),
    chat_template: str | None = None,
) -> Call[AdapterStatus]:
    """Serve the adapter at `source` (a folder below an adapter root, a Hugging Face id or a URL) under a name, for
    `tenants` only if any are given. `replace` allows to replace an adapter of this name. `chat_template` is `auto`
    (the template in the adapter's folder), `model` (the base model's) or a Jinja template."""
    body = api.NativeLoadRequest(
        name=name,
        source=source,
        base_model=base_model,
        replace=replace,
        tenants=list(tenants),
        chat_template=chat_template,
    )
    return Call.of(api.LOAD, body=body)


def reload_adapter(name: str) -> Call[Reloaded]:
    """Read an adapter's source again. Running requests end on the old version."""
    return Call.of(api.RELOAD, name)


def unload_adapter(name: str, *, drain_seconds: float | None = None, base_model: str = "") -> Call[int]:
    """Unload an adapter once its running requests have ended; those left after `drain_seconds` are aborted, and their
    number is returned."""
    query = {"drain_seconds": drain_seconds, "base_model": base_model}
    return Call.of(api.UNLOAD, name, query=query, field="aborted")


def pin_adapter(name: str) -> Call[AdapterStatus]:
    """Pin an adapter, so that it stays on the device."""
    return Call.of(api.PIN, name)


def unpin_adapter(name: str) -> Call[AdapterStatus]:
    """Unpin an adapter, so that it may be evicted."""
    return Call.of(api.UNPIN, name)


def alias_adapter(name: str, alias: str, *, remove: bool = False) -> Call[AdapterStatus]:
    """Add an alias to an adapter, or remove it."""
    return Call.of(api.ALIAS, name, body=api.AliasRequest(alias=alias, remove=remove))


def allow_adapter(name: str, tenants: Sequence[str]) -> Call[AdapterStatus]:
    """Set the tenants that may use an adapter. An empty list permits every tenant whose configuration allows it."""
    return Call.of(api.ALLOW, name, body=api.AllowRequest(tenants=list(tenants)))
