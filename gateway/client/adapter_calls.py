"""Calls about adapters."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.adapters.status import AdapterStatus
from gateway.client.call import Call
from gateway.client.paths import path_parts
from gateway.http.admin import ADAPTERS
from gateway.http.openapi.answers import Adapters, Reloaded, Unloaded
from gateway.openai.schema import AliasRequest, AllowRequest, NativeLoadRequest


def adapters() -> Call[list[AdapterStatus]]:
    """Return all adapters, with their tiers, sizes and use."""
    return Call("GET", ADAPTERS, Adapters, field="adapters")


def adapter(name: str) -> Call[AdapterStatus]:
    """Return one adapter."""
    return Call("GET", _path(name), AdapterStatus)


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
    body = NativeLoadRequest(
        name=name,
        source=source,
        base_model=base_model,
        replace=replace,
        tenants=list(tenants),
        chat_template=chat_template,
    )
    return Call("POST", ADAPTERS, AdapterStatus, body=body)


def reload_adapter(name: str) -> Call[Reloaded]:
    """Read an adapter's source again. Running requests end on the old version."""
    return Call("POST", _path(name, "reload"), Reloaded)


def unload_adapter(name: str, *, drain_seconds: float | None = None, base_model: str = "") -> Call[int]:
    """Unload an adapter once its running requests have ended; those left after `drain_seconds` are aborted, and their
    number is returned."""
    query = {"drain_seconds": drain_seconds, "base_model": base_model}
    return Call("DELETE", _path(name), Unloaded, query, field="aborted")


def pin_adapter(name: str) -> Call[AdapterStatus]:
    """Pin an adapter, so that it stays on the device."""
    return Call("POST", _path(name, "pin"), AdapterStatus)


def unpin_adapter(name: str) -> Call[AdapterStatus]:
    """Unpin an adapter, so that it may be evicted."""
    return Call("POST", _path(name, "unpin"), AdapterStatus)


def alias_adapter(name: str, alias: str, *, remove: bool = False) -> Call[AdapterStatus]:
    """Add an alias to an adapter, or remove it."""
    return Call("POST", _path(name, "aliases"), AdapterStatus, body=AliasRequest(alias=alias, remove=remove))


def allow_adapter(name: str, tenants: Sequence[str]) -> Call[AdapterStatus]:
    """Set the tenants that may use an adapter. An empty list permits every tenant whose configuration allows it."""
    return Call("POST", _path(name, "tenants"), AdapterStatus, body=AllowRequest(tenants=list(tenants)))


def _path(name: str, action: str = "") -> str:
    return f"{ADAPTERS}/{path_parts(name)}" + (f"/{action}" if action else "")
