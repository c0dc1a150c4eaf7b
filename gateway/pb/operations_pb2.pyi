from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListLanesRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class ListLanesResponse(_message.Message):
    __slots__ = ("lanes",)
    LANES_FIELD_NUMBER: _ClassVar[int]
    lanes: _containers.RepeatedCompositeFieldContainer[LaneStatus]
    def __init__(self, lanes: _Optional[_Iterable[_Union[LaneStatus, _Mapping]]] = ...) -> None: ...

class Percentiles(_message.Message):
    __slots__ = ("p50", "p95", "p99", "count")
    P50_FIELD_NUMBER: _ClassVar[int]
    P95_FIELD_NUMBER: _ClassVar[int]
    P99_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    p50: float
    p95: float
    p99: float
    count: int
    def __init__(self, p50: _Optional[float] = ..., p95: _Optional[float] = ..., p99: _Optional[float] = ..., count: _Optional[int] = ...) -> None: ...

class LaneStatus(_message.Message):
    __slots__ = ("lane", "mode", "running", "waiting", "oldest_wait_seconds", "slo_ttft_attainment", "slo_itl_attainment", "preemptions", "device_seconds", "ttft_seconds", "itl_seconds", "window_seconds", "ttft_goal_seconds", "itl_goal_seconds", "attainment_goal", "model")
    LANE_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    OLDEST_WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SLO_TTFT_ATTAINMENT_FIELD_NUMBER: _ClassVar[int]
    SLO_ITL_ATTAINMENT_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TTFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ITL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TTFT_GOAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ITL_GOAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ATTAINMENT_GOAL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    lane: str
    mode: str
    running: int
    waiting: int
    oldest_wait_seconds: float
    slo_ttft_attainment: float
    slo_itl_attainment: float
    preemptions: int
    device_seconds: float
    ttft_seconds: Percentiles
    itl_seconds: Percentiles
    window_seconds: float
    ttft_goal_seconds: float
    itl_goal_seconds: float
    attainment_goal: float
    model: str
    def __init__(self, lane: _Optional[str] = ..., mode: _Optional[str] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., oldest_wait_seconds: _Optional[float] = ..., slo_ttft_attainment: _Optional[float] = ..., slo_itl_attainment: _Optional[float] = ..., preemptions: _Optional[int] = ..., device_seconds: _Optional[float] = ..., ttft_seconds: _Optional[_Union[Percentiles, _Mapping]] = ..., itl_seconds: _Optional[_Union[Percentiles, _Mapping]] = ..., window_seconds: _Optional[float] = ..., ttft_goal_seconds: _Optional[float] = ..., itl_goal_seconds: _Optional[float] = ..., attainment_goal: _Optional[float] = ..., model: _Optional[str] = ...) -> None: ...

class SetLaneRequest(_message.Message):
    __slots__ = ("lane", "action", "model")
    LANE_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    lane: str
    action: str
    model: str
    def __init__(self, lane: _Optional[str] = ..., action: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class ListEnginesRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class ListEnginesResponse(_message.Message):
    __slots__ = ("engines",)
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    engines: _containers.RepeatedCompositeFieldContainer[EngineOverview]
    def __init__(self, engines: _Optional[_Iterable[_Union[EngineOverview, _Mapping]]] = ...) -> None: ...

class EngineOverview(_message.Message):
    __slots__ = ("name", "address", "state", "problem", "model", "device", "life", "running", "waiting", "streams", "free_pages", "total_pages", "adapters_on_device", "predicted_wait_seconds", "base_model", "added_by", "notice", "weights", "tensor_parallel", "pipeline_parallel", "role")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    LIFE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_ON_DEVICE_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    ADDED_BY_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    state: str
    problem: str
    model: str
    device: str
    life: str
    running: int
    waiting: int
    streams: int
    free_pages: int
    total_pages: int
    adapters_on_device: int
    predicted_wait_seconds: float
    base_model: str
    added_by: str
    notice: str
    weights: str
    tensor_parallel: int
    pipeline_parallel: int
    role: str
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., state: _Optional[str] = ..., problem: _Optional[str] = ..., model: _Optional[str] = ..., device: _Optional[str] = ..., life: _Optional[str] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., streams: _Optional[int] = ..., free_pages: _Optional[int] = ..., total_pages: _Optional[int] = ..., adapters_on_device: _Optional[int] = ..., predicted_wait_seconds: _Optional[float] = ..., base_model: _Optional[str] = ..., added_by: _Optional[str] = ..., notice: _Optional[str] = ..., weights: _Optional[str] = ..., tensor_parallel: _Optional[int] = ..., pipeline_parallel: _Optional[int] = ..., role: _Optional[str] = ...) -> None: ...

class AddEngineRequest(_message.Message):
    __slots__ = ("engine", "address", "model", "role")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    engine: str
    address: str
    model: str
    role: str
    def __init__(self, engine: _Optional[str] = ..., address: _Optional[str] = ..., model: _Optional[str] = ..., role: _Optional[str] = ...) -> None: ...

class RemoveEngineRequest(_message.Message):
    __slots__ = ("engine", "model")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    engine: str
    model: str
    def __init__(self, engine: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class RemoveEngineResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetEngineRequest(_message.Message):
    __slots__ = ("engine", "action", "model", "seconds")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    engine: str
    action: str
    model: str
    seconds: float
    def __init__(self, engine: _Optional[str] = ..., action: _Optional[str] = ..., model: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("requests", "total")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[LiveRequest]
    total: int
    def __init__(self, requests: _Optional[_Iterable[_Union[LiveRequest, _Mapping]]] = ..., total: _Optional[int] = ...) -> None: ...

class LiveRequest(_message.Message):
    __slots__ = ("id", "request_id", "tenant", "key", "model", "adapter", "lane", "state", "answers", "prompt_tokens", "cached_tokens", "generated_tokens", "max_tokens", "preemptions", "age_seconds", "started", "base_model")
    ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    id: str
    request_id: str
    tenant: str
    key: str
    model: str
    adapter: str
    lane: str
    state: str
    answers: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    max_tokens: int
    preemptions: int
    age_seconds: float
    started: float
    base_model: str
    def __init__(self, id: _Optional[str] = ..., request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., key: _Optional[str] = ..., model: _Optional[str] = ..., adapter: _Optional[str] = ..., lane: _Optional[str] = ..., state: _Optional[str] = ..., answers: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., age_seconds: _Optional[float] = ..., started: _Optional[float] = ..., base_model: _Optional[str] = ...) -> None: ...

class CancelRequestRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...
