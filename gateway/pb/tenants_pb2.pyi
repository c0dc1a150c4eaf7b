from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tenant(_message.Message):
    __slots__ = ("name", "default_lane", "highest_lane", "adapters", "weight", "disabled", "created", "updated", "unknown_fields", "classes", "upstreams")
    class ClassesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: RequestClass
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[RequestClass, _Mapping]] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_LANE_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_LANE_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    DISABLED_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    UPDATED_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELDS_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    UPSTREAMS_FIELD_NUMBER: _ClassVar[int]
    name: str
    default_lane: str
    highest_lane: str
    adapters: _containers.RepeatedScalarFieldContainer[str]
    weight: float
    disabled: bool
    created: float
    updated: float
    unknown_fields: str
    classes: _containers.MessageMap[str, RequestClass]
    upstreams: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., default_lane: _Optional[str] = ..., highest_lane: _Optional[str] = ..., adapters: _Optional[_Iterable[str]] = ..., weight: _Optional[float] = ..., disabled: _Optional[bool] = ..., created: _Optional[float] = ..., updated: _Optional[float] = ..., unknown_fields: _Optional[str] = ..., classes: _Optional[_Mapping[str, RequestClass]] = ..., upstreams: _Optional[_Iterable[str]] = ...) -> None: ...

class RequestClass(_message.Message):
    __slots__ = ("weight", "priority", "ttft_s", "itl_s")
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    ITL_S_FIELD_NUMBER: _ClassVar[int]
    weight: float
    priority: int
    ttft_s: float
    itl_s: float
    def __init__(self, weight: _Optional[float] = ..., priority: _Optional[int] = ..., ttft_s: _Optional[float] = ..., itl_s: _Optional[float] = ...) -> None: ...

class TenantFields(_message.Message):
    __slots__ = ("default_lane", "highest_lane", "adapters", "set_adapters", "weight", "unknown_fields", "classes", "set_classes", "upstreams", "set_upstreams")
    class ClassesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: RequestClass
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[RequestClass, _Mapping]] = ...) -> None: ...
    DEFAULT_LANE_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_LANE_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    SET_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELDS_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    SET_CLASSES_FIELD_NUMBER: _ClassVar[int]
    UPSTREAMS_FIELD_NUMBER: _ClassVar[int]
    SET_UPSTREAMS_FIELD_NUMBER: _ClassVar[int]
    default_lane: str
    highest_lane: str
    adapters: _containers.RepeatedScalarFieldContainer[str]
    set_adapters: bool
    weight: float
    unknown_fields: str
    classes: _containers.MessageMap[str, RequestClass]
    set_classes: bool
    upstreams: _containers.RepeatedScalarFieldContainer[str]
    set_upstreams: bool
    def __init__(self, default_lane: _Optional[str] = ..., highest_lane: _Optional[str] = ..., adapters: _Optional[_Iterable[str]] = ..., set_adapters: _Optional[bool] = ..., weight: _Optional[float] = ..., unknown_fields: _Optional[str] = ..., classes: _Optional[_Mapping[str, RequestClass]] = ..., set_classes: _Optional[bool] = ..., upstreams: _Optional[_Iterable[str]] = ..., set_upstreams: _Optional[bool] = ...) -> None: ...

class CreateTenantRequest(_message.Message):
    __slots__ = ("name", "fields")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    fields: TenantFields
    def __init__(self, name: _Optional[str] = ..., fields: _Optional[_Union[TenantFields, _Mapping]] = ...) -> None: ...

class GetTenantRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ListTenantsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListTenantsResponse(_message.Message):
    __slots__ = ("tenants",)
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    tenants: _containers.RepeatedCompositeFieldContainer[Tenant]
    def __init__(self, tenants: _Optional[_Iterable[_Union[Tenant, _Mapping]]] = ...) -> None: ...

class UpdateTenantRequest(_message.Message):
    __slots__ = ("name", "fields")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    fields: TenantFields
    def __init__(self, name: _Optional[str] = ..., fields: _Optional[_Union[TenantFields, _Mapping]] = ...) -> None: ...

class DisableTenantRequest(_message.Message):
    __slots__ = ("name", "enable")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ENABLE_FIELD_NUMBER: _ClassVar[int]
    name: str
    enable: bool
    def __init__(self, name: _Optional[str] = ..., enable: _Optional[bool] = ...) -> None: ...

class DeleteTenantRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DeleteTenantResponse(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: int
    def __init__(self, keys: _Optional[int] = ...) -> None: ...

class Key(_message.Message):
    __slots__ = ("id", "tenant", "label", "disabled", "created", "updated", "counts_as")
    ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    DISABLED_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    UPDATED_FIELD_NUMBER: _ClassVar[int]
    COUNTS_AS_FIELD_NUMBER: _ClassVar[int]
    id: str
    tenant: str
    label: str
    disabled: bool
    created: float
    updated: float
    counts_as: str
    def __init__(self, id: _Optional[str] = ..., tenant: _Optional[str] = ..., label: _Optional[str] = ..., disabled: _Optional[bool] = ..., created: _Optional[float] = ..., updated: _Optional[float] = ..., counts_as: _Optional[str] = ...) -> None: ...

class NewKey(_message.Message):
    __slots__ = ("key", "secret")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    key: Key
    secret: str
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ..., secret: _Optional[str] = ...) -> None: ...

class CreateKeyRequest(_message.Message):
    __slots__ = ("tenant", "label")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    label: str
    def __init__(self, tenant: _Optional[str] = ..., label: _Optional[str] = ...) -> None: ...

class ListKeysRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class ListKeysResponse(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[Key]
    def __init__(self, keys: _Optional[_Iterable[_Union[Key, _Mapping]]] = ...) -> None: ...

class RotateKeyRequest(_message.Message):
    __slots__ = ("id", "keep")
    ID_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    id: str
    keep: bool
    def __init__(self, id: _Optional[str] = ..., keep: _Optional[bool] = ...) -> None: ...

class DisableKeyRequest(_message.Message):
    __slots__ = ("id", "enable")
    ID_FIELD_NUMBER: _ClassVar[int]
    ENABLE_FIELD_NUMBER: _ClassVar[int]
    id: str
    enable: bool
    def __init__(self, id: _Optional[str] = ..., enable: _Optional[bool] = ...) -> None: ...

class DeleteKeyRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class DeleteKeyResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
