from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LimitScope(_message.Message):
    __slots__ = ("tenant", "key", "adapter")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    key: str
    adapter: str
    def __init__(self, tenant: _Optional[str] = ..., key: _Optional[str] = ..., adapter: _Optional[str] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("requests_per_minute", "tokens_per_minute", "concurrent_requests", "tokens_per_day", "shadow", "when_redis_is_away")
    class WhenRedisIsAwayEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REQUESTS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    CONCURRENT_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_DAY_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    WHEN_REDIS_IS_AWAY_FIELD_NUMBER: _ClassVar[int]
    requests_per_minute: int
    tokens_per_minute: int
    concurrent_requests: int
    tokens_per_day: int
    shadow: _containers.RepeatedScalarFieldContainer[str]
    when_redis_is_away: _containers.ScalarMap[str, str]
    def __init__(self, requests_per_minute: _Optional[int] = ..., tokens_per_minute: _Optional[int] = ..., concurrent_requests: _Optional[int] = ..., tokens_per_day: _Optional[int] = ..., shadow: _Optional[_Iterable[str]] = ..., when_redis_is_away: _Optional[_Mapping[str, str]] = ...) -> None: ...

class LimitEntry(_message.Message):
    __slots__ = ("scope", "limits", "source")
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    scope: LimitScope
    limits: Limits
    source: str
    def __init__(self, scope: _Optional[_Union[LimitScope, _Mapping]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., source: _Optional[str] = ...) -> None: ...

class GetLimitsRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class GetLimitsResponse(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[LimitEntry]
    def __init__(self, entries: _Optional[_Iterable[_Union[LimitEntry, _Mapping]]] = ...) -> None: ...

class SetLimitsRequest(_message.Message):
    __slots__ = ("scope", "limits", "lift", "set_shadow", "set_when_redis_is_away")
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    LIFT_FIELD_NUMBER: _ClassVar[int]
    SET_SHADOW_FIELD_NUMBER: _ClassVar[int]
    SET_WHEN_REDIS_IS_AWAY_FIELD_NUMBER: _ClassVar[int]
    scope: LimitScope
    limits: Limits
    lift: _containers.RepeatedScalarFieldContainer[str]
    set_shadow: bool
    set_when_redis_is_away: bool
    def __init__(self, scope: _Optional[_Union[LimitScope, _Mapping]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., lift: _Optional[_Iterable[str]] = ..., set_shadow: _Optional[bool] = ..., set_when_redis_is_away: _Optional[bool] = ...) -> None: ...

class ResetLimitsRequest(_message.Message):
    __slots__ = ("scope", "used")
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    scope: LimitScope
    used: bool
    def __init__(self, scope: _Optional[_Union[LimitScope, _Mapping]] = ..., used: _Optional[bool] = ...) -> None: ...

class ResetLimitsResponse(_message.Message):
    __slots__ = ("limits",)
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    limits: Limits
    def __init__(self, limits: _Optional[_Union[Limits, _Mapping]] = ...) -> None: ...

class LimitUsageRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class LimitUsageResponse(_message.Message):
    __slots__ = ("scopes",)
    SCOPES_FIELD_NUMBER: _ClassVar[int]
    scopes: _containers.RepeatedCompositeFieldContainer[ScopeUsage]
    def __init__(self, scopes: _Optional[_Iterable[_Union[ScopeUsage, _Mapping]]] = ...) -> None: ...

class WatchLimitsRequest(_message.Message):
    __slots__ = ("tenant", "interval_seconds")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    interval_seconds: float
    def __init__(self, tenant: _Optional[str] = ..., interval_seconds: _Optional[float] = ...) -> None: ...

class ScopeUsage(_message.Message):
    __slots__ = ("scope", "limits", "refused_at", "refused_by")
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_AT_FIELD_NUMBER: _ClassVar[int]
    REFUSED_BY_FIELD_NUMBER: _ClassVar[int]
    scope: LimitScope
    limits: _containers.RepeatedCompositeFieldContainer[LimitUsage]
    refused_at: float
    refused_by: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, scope: _Optional[_Union[LimitScope, _Mapping]] = ..., limits: _Optional[_Iterable[_Union[LimitUsage, _Mapping]]] = ..., refused_at: _Optional[float] = ..., refused_by: _Optional[_Iterable[str]] = ...) -> None: ...

class LimitUsage(_message.Message):
    __slots__ = ("name", "limit", "used", "remaining", "reset_seconds", "shadow", "refused_today")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    REMAINING_FIELD_NUMBER: _ClassVar[int]
    RESET_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    REFUSED_TODAY_FIELD_NUMBER: _ClassVar[int]
    name: str
    limit: int
    used: float
    remaining: float
    reset_seconds: float
    shadow: bool
    refused_today: int
    def __init__(self, name: _Optional[str] = ..., limit: _Optional[int] = ..., used: _Optional[float] = ..., remaining: _Optional[float] = ..., reset_seconds: _Optional[float] = ..., shadow: _Optional[bool] = ..., refused_today: _Optional[int] = ...) -> None: ...
