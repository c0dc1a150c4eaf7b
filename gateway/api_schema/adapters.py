"""Adapters: what operators send and get, and the operations."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from gateway.api_schema.operation import TEXT, Operation, admin
from gateway.core.errors import Fault

ADAPTERS = "/admin/v1/adapters"
ADAPTER = ADAPTERS + "/{name:path}"
MAX_DRAIN_SECONDS = 86_400.0


class AdapterStatus(Struct, frozen=True):
    """Status of one adapter name on this gateway. Fields that `AdapterRecord` has too mean the same. `served_version`
    is the version that new requests get, `error` the reason why it is not the registry's, each empty if there is none;
    the fields from `tier` to `idle_seconds` that the record lacks are the engine's statistics of the served version.

    It is a Struct because one list may need thousands: a frozen dataclass of so many fields takes ten times as long to
    make.
    """

    name: str
    base_model: str
    """Name of the base model that the adapter belongs to."""
    aliases: tuple[str, ...]
    tier: str
    """Tier of the served version: disk, fetching, host or resident."""
    version: str
    served_version: str
    """Version that new requests get on this gateway: `version`, or the previous one while `version` is being loaded.
    Empty means that requests for this name are refused."""
    rank: int
    bytes: int
    pages: int
    running: int
    """Requests of the served version that run in this gateway's engine, under any name; `waiting` ones wait."""
    waiting: int
    hits: int
    """Number of requests that found the adapter on the device."""
    loads: int
    """Number of copies to the device."""
    fetches: int
    """Number of reads from disk."""
    last_load_seconds: float
    last_fetch_seconds: float
    idle_seconds: float | None
    """Seconds since a request last used the adapter. None means that none did."""
    pinned: bool
    tenants: tuple[str, ...]
    target_modules: tuple[str, ...]
    source: str
    path: str
    created: float
    updated: float
    generation: int
    error: str
    """Reason why this gateway does not serve the registry's version, or could not once it is evicted. Empty means that
    there is none."""
    warnings: tuple[str, ...]
    """What operators should know of the adapter although it is served."""
    chat_template: str
    """Which template renders chats of the adapter: `model`, the base model's; `auto`, that of the adapter's folder; or
    `given`, one that an operator sent."""


class Adapters(Struct):
    adapters: list[AdapterStatus]


class Reloaded(Struct):
    changed: bool
    adapter: AdapterStatus


class Unloaded(Struct):
    aborted: int


class LoadAdapterRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of /v1/load_lora_adapter, as in vLLM's API. `load_inplace` allows to replace an adapter of this name."""

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None
    is_3d_lora_weight: bool | None = None
    """Accepted from vLLM's clients; the gateway reads the layout of experts from the adapter's own tensors."""


class UnloadAdapterRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of /v1/unload_lora_adapter, as in vLLM's API."""

    lora_name: str
    lora_int_id: int | None = None
    """Accepted from vLLM's clients; the name says which adapter is meant."""


class NativeLoadRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /admin/v1/adapters. `replace` allows to replace an adapter of this name. Without `tenants`, a new
    adapter is not restricted to tenants, and a replaced one stays as restricted as it was. Unknown fields are refused,
    so that a misspelling of `tenants` cannot give an adapter to all of them."""

    name: str
    source: str
    base_model: str = ""
    """Base model that the adapter is for. Without it, the gateway reads that from the adapter's own configuration."""
    replace: bool = False
    tenants: list[str] = []
    chat_template: str | None = None
    """What renders chats of the adapter: `auto` is the template in its folder, `model` that of the base model, and
    other text a Jinja template. Without it, a new adapter has the base model's, and a replaced one the same as
    before."""


class AliasRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /admin/v1/adapters/NAME/aliases: add an alias to the adapter or, with `remove`, remove it."""

    alias: str
    remove: bool = False


class AllowRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /admin/v1/adapters/NAME/tenants: the tenants that may use the adapter, in place of the former list.
    An empty list permits every tenant whose configuration allows the adapter."""

    tenants: list[str]


LISTED = frozenset({Fault.ENGINE_UNAVAILABLE, Fault.INVALID_REQUEST, Fault.REGISTRY_UNAVAILABLE})
LOADED = LISTED | {Fault.ADAPTER_EXISTS, Fault.ADAPTER_CONFLICT, Fault.ADAPTER_UNLOADED}
CHANGED = LOADED | {Fault.MODEL_NOT_FOUND}
DRAIN = {
    "drain_seconds": {"type": "number", "minimum": 0, "maximum": MAX_DRAIN_SECONDS},
    "base_model": {"type": "string", "description": "Base model of the adapter, if two have one of this name."},
}


def _change(action: str, summary: str, body: type[Struct] | None = None) -> Operation[AdapterStatus]:
    return admin("POST", ADAPTER + action, summary, AdapterStatus, CHANGED, body=body)


LOAD_AS_VLLM = admin("POST", "/v1/load_lora_adapter", "Load an adapter (vLLM).", TEXT, LOADED, body=LoadAdapterRequest)
UNLOAD_AS_VLLM = admin(
    "POST", "/v1/unload_lora_adapter", "Unload an adapter (vLLM).", TEXT, CHANGED, body=UnloadAdapterRequest
)
LIST = admin("GET", ADAPTERS, "List all adapters.", Adapters, LISTED)
LOAD = admin("POST", ADAPTERS, "Load an adapter.", AdapterStatus, LOADED, body=NativeLoadRequest)
RELOAD = admin("POST", ADAPTER + "/reload", "Reload an adapter from its source.", Reloaded, CHANGED)
PIN = _change("/pin", "Pin an adapter, so that it stays on the device.")
UNPIN = _change("/unpin", "Unpin an adapter, so that it may be evicted.")
ALIAS = _change("/aliases", "Add or remove an alias of an adapter.", AliasRequest)
ALLOW = _change("/tenants", "Set the tenants that may use an adapter.", AllowRequest)
GET = admin("GET", ADAPTER, "Get an adapter.", AdapterStatus, CHANGED)
UNLOAD = admin("DELETE", ADAPTER, "Unload an adapter.", Unloaded, CHANGED, query=DRAIN)

OPERATIONS: tuple[Operation[Any], ...] = (
    LOAD_AS_VLLM,
    UNLOAD_AS_VLLM,
    LIST,
    LOAD,
    RELOAD,
    PIN,
    UNPIN,
    ALIAS,
    ALLOW,
    GET,
    UNLOAD,
)
"""In the order of their routes: a name may have slashes, so that those that only read or unload one come last."""
