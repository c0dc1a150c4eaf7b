from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path", "replace", "tenants", "base_model", "chat_template")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    replace: bool
    tenants: _containers.RepeatedScalarFieldContainer[str]
    base_model: str
    chat_template: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., replace: _Optional[bool] = ..., tenants: _Optional[_Iterable[str]] = ..., base_model: _Optional[str] = ..., chat_template: _Optional[str] = ...) -> None: ...

class ReloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ReloadAdapterResponse(_message.Message):
    __slots__ = ("adapter", "changed")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    adapter: Adapter
    changed: bool
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ..., changed: _Optional[bool] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name", "drain_seconds", "base_model")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DRAIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    drain_seconds: float
    base_model: str
    def __init__(self, name: _Optional[str] = ..., drain_seconds: _Optional[float] = ..., base_model: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ("aborted",)
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    aborted: int
    def __init__(self, aborted: _Optional[int] = ...) -> None: ...

class PinAdapterRequest(_message.Message):
    __slots__ = ("name", "pinned")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    name: str
    pinned: bool
    def __init__(self, name: _Optional[str] = ..., pinned: _Optional[bool] = ...) -> None: ...

class AliasAdapterRequest(_message.Message):
    __slots__ = ("name", "alias", "remove")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    REMOVE_FIELD_NUMBER: _ClassVar[int]
    name: str
    alias: str
    remove: bool
    def __init__(self, name: _Optional[str] = ..., alias: _Optional[str] = ..., remove: _Optional[bool] = ...) -> None: ...

class AllowTenantsRequest(_message.Message):
    __slots__ = ("name", "tenants")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    tenants: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., tenants: _Optional[_Iterable[str]] = ...) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    def __init__(self, adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ...) -> None: ...

class WatchAdaptersRequest(_message.Message):
    __slots__ = ("interval_seconds",)
    INTERVAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    interval_seconds: float
    def __init__(self, interval_seconds: _Optional[float] = ...) -> None: ...

class WatchAdaptersResponse(_message.Message):
    __slots__ = ("adapters", "removed")
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    removed: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., removed: _Optional[_Iterable[str]] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "version", "path", "rank", "target_modules", "tier", "pages", "bytes", "running", "waiting", "aliases", "source", "served_version", "hits", "loads", "fetches", "last_load_seconds", "last_fetch_seconds", "idle_seconds", "pinned", "tenants", "created", "updated", "generation", "error", "base_model", "warnings", "chat_template")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TARGET_MODULES_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SERVED_VERSION_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    FETCHES_FIELD_NUMBER: _ClassVar[int]
    LAST_LOAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LAST_FETCH_SECONDS_FIELD_NUMBER: _ClassVar[int]
    IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    UPDATED_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    path: str
    rank: int
    target_modules: _containers.RepeatedScalarFieldContainer[str]
    tier: str
    pages: int
    bytes: int
    running: int
    waiting: int
    aliases: _containers.RepeatedScalarFieldContainer[str]
    source: str
    served_version: str
    hits: int
    loads: int
    fetches: int
    last_load_seconds: float
    last_fetch_seconds: float
    idle_seconds: float
    pinned: bool
    tenants: _containers.RepeatedScalarFieldContainer[str]
    created: float
    updated: float
    generation: int
    error: str
    base_model: str
    warnings: _containers.RepeatedScalarFieldContainer[str]
    chat_template: str
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., path: _Optional[str] = ..., rank: _Optional[int] = ..., target_modules: _Optional[_Iterable[str]] = ..., tier: _Optional[str] = ..., pages: _Optional[int] = ..., bytes: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., aliases: _Optional[_Iterable[str]] = ..., source: _Optional[str] = ..., served_version: _Optional[str] = ..., hits: _Optional[int] = ..., loads: _Optional[int] = ..., fetches: _Optional[int] = ..., last_load_seconds: _Optional[float] = ..., last_fetch_seconds: _Optional[float] = ..., idle_seconds: _Optional[float] = ..., pinned: _Optional[bool] = ..., tenants: _Optional[_Iterable[str]] = ..., created: _Optional[float] = ..., updated: _Optional[float] = ..., generation: _Optional[int] = ..., error: _Optional[str] = ..., base_model: _Optional[str] = ..., warnings: _Optional[_Iterable[str]] = ..., chat_template: _Optional[str] = ...) -> None: ...
