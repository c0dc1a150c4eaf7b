from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class UsageReportRequest(_message.Message):
    __slots__ = ("tenant", "key", "adapter", "lane", "to", "group_by")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    FROM_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    GROUP_BY_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    key: str
    adapter: str
    lane: str
    to: str
    group_by: str
    def __init__(self, tenant: _Optional[str] = ..., key: _Optional[str] = ..., adapter: _Optional[str] = ..., lane: _Optional[str] = ..., to: _Optional[str] = ..., group_by: _Optional[str] = ..., **kwargs) -> None: ...

class UsageReportResponse(_message.Message):
    __slots__ = ("to", "group_by", "currency", "usage", "total")
    FROM_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    GROUP_BY_FIELD_NUMBER: _ClassVar[int]
    CURRENCY_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    to: str
    group_by: _containers.RepeatedScalarFieldContainer[str]
    currency: str
    usage: _containers.RepeatedCompositeFieldContainer[UsageLine]
    total: UsageLine
    def __init__(self, to: _Optional[str] = ..., group_by: _Optional[_Iterable[str]] = ..., currency: _Optional[str] = ..., usage: _Optional[_Iterable[_Union[UsageLine, _Mapping]]] = ..., total: _Optional[_Union[UsageLine, _Mapping]] = ..., **kwargs) -> None: ...

class UsageLine(_message.Message):
    __slots__ = ("tenant", "key", "adapter", "lane", "day", "requests", "prompt_tokens", "cached_tokens", "completion_tokens", "device_seconds", "amount", "cost", "cost_per_million_tokens")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    DAY_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    AMOUNT_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    COST_PER_MILLION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    key: str
    adapter: str
    lane: str
    day: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    device_seconds: float
    amount: str
    cost: str
    cost_per_million_tokens: str
    def __init__(self, tenant: _Optional[str] = ..., key: _Optional[str] = ..., adapter: _Optional[str] = ..., lane: _Optional[str] = ..., day: _Optional[str] = ..., requests: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., device_seconds: _Optional[float] = ..., amount: _Optional[str] = ..., cost: _Optional[str] = ..., cost_per_million_tokens: _Optional[str] = ...) -> None: ...
