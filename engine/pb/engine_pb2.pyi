from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Lane(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LANE_INTERACTIVE: _ClassVar[Lane]
    LANE_BATCH: _ClassVar[Lane]

class LaneMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LANE_MODE_OPEN: _ClassVar[LaneMode]
    LANE_MODE_PAUSED: _ClassVar[LaneMode]
    LANE_MODE_DRAINING: _ClassVar[LaneMode]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_NONE: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]
    FINISH_REASON_POOLED: _ClassVar[FinishReason]

class AdapterTier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ADAPTER_TIER_DISK: _ClassVar[AdapterTier]
    ADAPTER_TIER_HOST: _ClassVar[AdapterTier]
    ADAPTER_TIER_DEVICE: _ClassVar[AdapterTier]
LANE_INTERACTIVE: Lane
LANE_BATCH: Lane
LANE_MODE_OPEN: LaneMode
LANE_MODE_PAUSED: LaneMode
LANE_MODE_DRAINING: LaneMode
FINISH_REASON_NONE: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
FINISH_REASON_ERROR: FinishReason
FINISH_REASON_POOLED: FinishReason
ADAPTER_TIER_DISK: AdapterTier
ADAPTER_TIER_HOST: AdapterTier
ADAPTER_TIER_DEVICE: AdapterTier

class Commands(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[Command]
    def __init__(self, commands: _Optional[_Iterable[_Union[Command, _Mapping]]] = ...) -> None: ...

class Command(_message.Message):
    __slots__ = ("submit", "abort", "fetch_kv")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    FETCH_KV_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    abort: Abort
    fetch_kv: Submit
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., fetch_kv: _Optional[_Union[Submit, _Mapping]] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("request_id", "prompt", "params", "adapter", "lane", "priority", "tenant", "weight", "deadline_seconds", "ttft_seconds", "itl_seconds", "whole", "expected_tokens", "cache_salt", "pooling", "origin", "produced", "moves", "suspect", "num_scored", "prediction", "request_class", "class_weight", "prefix_keys", "kv_source")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TTFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ITL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    PRODUCED_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    SUSPECT_FIELD_NUMBER: _ClassVar[int]
    NUM_SCORED_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_CLASS_FIELD_NUMBER: _ClassVar[int]
    CLASS_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    PREFIX_KEYS_FIELD_NUMBER: _ClassVar[int]
    KV_SOURCE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt: _containers.RepeatedScalarFieldContainer[int]
    params: SamplingParams
    adapter: str
    lane: Lane
    priority: int
    tenant: str
    weight: float
    deadline_seconds: float
    ttft_seconds: float
    itl_seconds: float
    whole: bool
    expected_tokens: int
    cache_salt: str
    pooling: Pooling
    origin: Origin
    produced: _containers.RepeatedScalarFieldContainer[int]
    moves: int
    suspect: bool
    num_scored: int
    prediction: _containers.RepeatedScalarFieldContainer[int]
    request_class: str
    class_weight: float
    prefix_keys: _containers.RepeatedScalarFieldContainer[int]
    kv_source: KvSource
    def __init__(self, request_id: _Optional[str] = ..., prompt: _Optional[_Iterable[int]] = ..., params: _Optional[_Union[SamplingParams, _Mapping]] = ..., adapter: _Optional[str] = ..., lane: _Optional[_Union[Lane, str]] = ..., priority: _Optional[int] = ..., tenant: _Optional[str] = ..., weight: _Optional[float] = ..., deadline_seconds: _Optional[float] = ..., ttft_seconds: _Optional[float] = ..., itl_seconds: _Optional[float] = ..., whole: _Optional[bool] = ..., expected_tokens: _Optional[int] = ..., cache_salt: _Optional[str] = ..., pooling: _Optional[_Union[Pooling, _Mapping]] = ..., origin: _Optional[_Union[Origin, _Mapping]] = ..., produced: _Optional[_Iterable[int]] = ..., moves: _Optional[int] = ..., suspect: _Optional[bool] = ..., num_scored: _Optional[int] = ..., prediction: _Optional[_Iterable[int]] = ..., request_class: _Optional[str] = ..., class_weight: _Optional[float] = ..., prefix_keys: _Optional[_Iterable[int]] = ..., kv_source: _Optional[_Union[KvSource, _Mapping]] = ...) -> None: ...

class KvSource(_message.Message):
    __slots__ = ("address", "seconds", "computes")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMPUTES_FIELD_NUMBER: _ClassVar[int]
    address: str
    seconds: float
    computes: bool
    def __init__(self, address: _Optional[str] = ..., seconds: _Optional[float] = ..., computes: _Optional[bool] = ...) -> None: ...

class Pooling(_message.Message):
    __slots__ = ("kind", "dimensions", "normalize", "shares_pages")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_LAST: _ClassVar[Pooling.Kind]
        KIND_MEAN: _ClassVar[Pooling.Kind]
    KIND_LAST: Pooling.Kind
    KIND_MEAN: Pooling.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    SHARES_PAGES_FIELD_NUMBER: _ClassVar[int]
    kind: Pooling.Kind
    dimensions: int
    normalize: bool
    shares_pages: bool
    def __init__(self, kind: _Optional[_Union[Pooling.Kind, str]] = ..., dimensions: _Optional[int] = ..., normalize: _Optional[bool] = ..., shares_pages: _Optional[bool] = ...) -> None: ...

class Origin(_message.Message):
    __slots__ = ("id", "request_id", "key", "model", "adapter", "reserved_tokens")
    ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    RESERVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    id: str
    request_id: str
    key: str
    model: str
    adapter: str
    reserved_tokens: int
    def __init__(self, id: _Optional[str] = ..., request_id: _Optional[str] = ..., key: _Optional[str] = ..., model: _Optional[str] = ..., adapter: _Optional[str] = ..., reserved_tokens: _Optional[int] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "logit_bias", "stop_token_ids", "ignore_eos", "logprobs", "grammar", "prompt_logprobs", "single_steps")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SINGLE_STEPS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    logit_bias: _containers.ScalarMap[int, float]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logprobs: int
    grammar: Grammar
    prompt_logprobs: int
    single_steps: bool
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., logprobs: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., prompt_logprobs: _Optional[int] = ..., single_steps: _Optional[bool] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("json_schema", "regex", "context_free")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FREE_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    context_free: str
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., context_free: _Optional[str] = ...) -> None: ...

class StepEvents(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[TokenEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[TokenEvent, _Mapping]]] = ...) -> None: ...

class TokenEvent(_message.Message):
    __slots__ = ("request_id", "token_ids", "logprobs", "finish_reason", "cached_tokens", "error_code", "error", "retry_after_seconds", "device_seconds", "wait_seconds", "adapter_wait_seconds", "vector", "prompt_logprobs", "proposals")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    VECTOR_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    finish_reason: FinishReason
    cached_tokens: int
    error_code: str
    error: str
    retry_after_seconds: float
    device_seconds: float
    wait_seconds: float
    adapter_wait_seconds: float
    vector: bytes
    prompt_logprobs: bytes
    proposals: _containers.RepeatedCompositeFieldContainer[ProposalCount]
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., cached_tokens: _Optional[int] = ..., error_code: _Optional[str] = ..., error: _Optional[str] = ..., retry_after_seconds: _Optional[float] = ..., device_seconds: _Optional[float] = ..., wait_seconds: _Optional[float] = ..., adapter_wait_seconds: _Optional[float] = ..., vector: _Optional[bytes] = ..., prompt_logprobs: _Optional[bytes] = ..., proposals: _Optional[_Iterable[_Union[ProposalCount, _Mapping]]] = ...) -> None: ...

class ProposalCount(_message.Message):
    __slots__ = ("proposer", "proposed", "accepted")
    PROPOSER_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    proposer: str
    proposed: int
    accepted: int
    def __init__(self, proposer: _Optional[str] = ..., proposed: _Optional[int] = ..., accepted: _Optional[int] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EngineInfo(_message.Message):
    __slots__ = ("model", "model_hash", "architecture", "device", "dtype", "backend", "max_model_len", "vocab_size", "num_pages", "block_size", "max_seqs", "page_bytes", "life", "previous", "protocol", "share_prefixes", "hidden_size", "weights", "outlook", "kv_address", "kv_identity", "tensor_parallel", "pipeline_parallel")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_HASH_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQS_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIFE_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    SHARE_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    OUTLOOK_FIELD_NUMBER: _ClassVar[int]
    KV_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    KV_IDENTITY_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_hash: str
    architecture: str
    device: str
    dtype: str
    backend: str
    max_model_len: int
    vocab_size: int
    num_pages: int
    block_size: int
    max_seqs: int
    page_bytes: int
    life: str
    previous: PreviousLife
    protocol: int
    share_prefixes: bool
    hidden_size: int
    weights: str
    outlook: Outlook
    kv_address: str
    kv_identity: str
    tensor_parallel: int
    pipeline_parallel: int
    def __init__(self, model: _Optional[str] = ..., model_hash: _Optional[str] = ..., architecture: _Optional[str] = ..., device: _Optional[str] = ..., dtype: _Optional[str] = ..., backend: _Optional[str] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., num_pages: _Optional[int] = ..., block_size: _Optional[int] = ..., max_seqs: _Optional[int] = ..., page_bytes: _Optional[int] = ..., life: _Optional[str] = ..., previous: _Optional[_Union[PreviousLife, _Mapping]] = ..., protocol: _Optional[int] = ..., share_prefixes: _Optional[bool] = ..., hidden_size: _Optional[int] = ..., weights: _Optional[str] = ..., outlook: _Optional[_Union[Outlook, _Mapping]] = ..., kv_address: _Optional[str] = ..., kv_identity: _Optional[str] = ..., tensor_parallel: _Optional[int] = ..., pipeline_parallel: _Optional[int] = ...) -> None: ...

class Outlook(_message.Message):
    __slots__ = ("host_pages", "adapter_pages", "adapter_bytes_per_rank", "host_adapter_bytes", "free_bytes", "decode_seconds", "prompt_tokens")
    HOST_PAGES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_PAGES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_BYTES_PER_RANK_FIELD_NUMBER: _ClassVar[int]
    HOST_ADAPTER_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DECODE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    host_pages: int
    adapter_pages: int
    adapter_bytes_per_rank: int
    host_adapter_bytes: int
    free_bytes: int
    decode_seconds: float
    prompt_tokens: int
    def __init__(self, host_pages: _Optional[int] = ..., adapter_pages: _Optional[int] = ..., adapter_bytes_per_rank: _Optional[int] = ..., host_adapter_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., decode_seconds: _Optional[float] = ..., prompt_tokens: _Optional[int] = ...) -> None: ...

class PreviousLife(_message.Message):
    __slots__ = ("life", "crashed", "request_ids")
    LIFE_FIELD_NUMBER: _ClassVar[int]
    CRASHED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    life: str
    crashed: bool
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, life: _Optional[str] = ..., crashed: _Optional[bool] = ..., request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class AdapterInfo(_message.Message):
    __slots__ = ("adapter", "rank", "target_modules", "pages", "bytes", "load_seconds", "invocation", "warnings")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TARGET_MODULES_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    LOAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    INVOCATION_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    rank: int
    target_modules: _containers.RepeatedScalarFieldContainer[str]
    pages: int
    bytes: int
    load_seconds: float
    invocation: _containers.RepeatedScalarFieldContainer[int]
    warnings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, adapter: _Optional[str] = ..., rank: _Optional[int] = ..., target_modules: _Optional[_Iterable[str]] = ..., pages: _Optional[int] = ..., bytes: _Optional[int] = ..., load_seconds: _Optional[float] = ..., invocation: _Optional[_Iterable[int]] = ..., warnings: _Optional[_Iterable[str]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("adapter", "drain_seconds")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    DRAIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    drain_seconds: float
    def __init__(self, adapter: _Optional[str] = ..., drain_seconds: _Optional[float] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ("aborted",)
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    aborted: int
    def __init__(self, aborted: _Optional[int] = ...) -> None: ...

class PinAdapterRequest(_message.Message):
    __slots__ = ("adapter", "pinned")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    pinned: bool
    def __init__(self, adapter: _Optional[str] = ..., pinned: _Optional[bool] = ...) -> None: ...

class PinAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ("check",)
    CHECK_FIELD_NUMBER: _ClassVar[int]
    check: bool
    def __init__(self, check: _Optional[bool] = ...) -> None: ...

class RequestsRequest(_message.Message):
    __slots__ = ("limit",)
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    limit: int
    def __init__(self, limit: _Optional[int] = ...) -> None: ...

class LiveRequest(_message.Message):
    __slots__ = ("request_id", "origin", "tenant", "lane", "running", "prompt_tokens", "cached_tokens", "generated_tokens", "max_tokens", "age_seconds", "preemptions")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    origin: Origin
    tenant: str
    lane: Lane
    running: bool
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    max_tokens: int
    age_seconds: float
    preemptions: int
    def __init__(self, request_id: _Optional[str] = ..., origin: _Optional[_Union[Origin, _Mapping]] = ..., tenant: _Optional[str] = ..., lane: _Optional[_Union[Lane, str]] = ..., running: _Optional[bool] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., age_seconds: _Optional[float] = ..., preemptions: _Optional[int] = ...) -> None: ...

class RequestsResponse(_message.Message):
    __slots__ = ("requests", "total", "reserved_tokens")
    class ReservedTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    RESERVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[LiveRequest]
    total: int
    reserved_tokens: _containers.ScalarMap[str, int]
    def __init__(self, requests: _Optional[_Iterable[_Union[LiveRequest, _Mapping]]] = ..., total: _Optional[int] = ..., reserved_tokens: _Optional[_Mapping[str, int]] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ("cancelled",)
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    cancelled: int
    def __init__(self, cancelled: _Optional[int] = ...) -> None: ...

class SetLaneRequest(_message.Message):
    __slots__ = ("lane", "mode")
    LANE_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    lane: Lane
    mode: LaneMode
    def __init__(self, lane: _Optional[_Union[Lane, str]] = ..., mode: _Optional[_Union[LaneMode, str]] = ...) -> None: ...

class SetLaneResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetGoalsRequest(_message.Message):
    __slots__ = ("lane", "ttft_seconds", "itl_seconds", "attainment", "max_wait_seconds")
    LANE_FIELD_NUMBER: _ClassVar[int]
    TTFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ITL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ATTAINMENT_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    lane: Lane
    ttft_seconds: float
    itl_seconds: float
    attainment: float
    max_wait_seconds: float
    def __init__(self, lane: _Optional[_Union[Lane, str]] = ..., ttft_seconds: _Optional[float] = ..., itl_seconds: _Optional[float] = ..., attainment: _Optional[float] = ..., max_wait_seconds: _Optional[float] = ...) -> None: ...

class SetGoalsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LaneStats(_message.Message):
    __slots__ = ("lane", "running", "waiting", "oldest_wait_seconds", "slo_ttft_attainment", "slo_itl_attainment", "device_seconds", "vtc_gap_seconds", "vtc_bound_seconds", "mode", "preemptions")
    LANE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    OLDEST_WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SLO_TTFT_ATTAINMENT_FIELD_NUMBER: _ClassVar[int]
    SLO_ITL_ATTAINMENT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    VTC_GAP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    VTC_BOUND_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    lane: Lane
    running: int
    waiting: int
    oldest_wait_seconds: float
    slo_ttft_attainment: float
    slo_itl_attainment: float
    device_seconds: float
    vtc_gap_seconds: float
    vtc_bound_seconds: float
    mode: LaneMode
    preemptions: int
    def __init__(self, lane: _Optional[_Union[Lane, str]] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., oldest_wait_seconds: _Optional[float] = ..., slo_ttft_attainment: _Optional[float] = ..., slo_itl_attainment: _Optional[float] = ..., device_seconds: _Optional[float] = ..., vtc_gap_seconds: _Optional[float] = ..., vtc_bound_seconds: _Optional[float] = ..., mode: _Optional[_Union[LaneMode, str]] = ..., preemptions: _Optional[int] = ...) -> None: ...

class TenantStats(_message.Message):
    __slots__ = ("lane", "tenant", "running", "waiting", "device_seconds", "served_seconds")
    LANE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    DEVICE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SERVED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    lane: Lane
    tenant: str
    running: int
    waiting: int
    device_seconds: float
    served_seconds: float
    def __init__(self, lane: _Optional[_Union[Lane, str]] = ..., tenant: _Optional[str] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., device_seconds: _Optional[float] = ..., served_seconds: _Optional[float] = ...) -> None: ...

class AdapterStats(_message.Message):
    __slots__ = ("adapter", "state", "pages", "running", "waiting", "rank", "bytes", "hits", "loads", "fetches", "last_load_seconds", "last_fetch_seconds", "idle_seconds", "pinned", "error")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    FETCHES_FIELD_NUMBER: _ClassVar[int]
    LAST_LOAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LAST_FETCH_SECONDS_FIELD_NUMBER: _ClassVar[int]
    IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    state: str
    pages: int
    running: int
    waiting: int
    rank: int
    bytes: int
    hits: int
    loads: int
    fetches: int
    last_load_seconds: float
    last_fetch_seconds: float
    idle_seconds: float
    pinned: bool
    error: str
    def __init__(self, adapter: _Optional[str] = ..., state: _Optional[str] = ..., pages: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., rank: _Optional[int] = ..., bytes: _Optional[int] = ..., hits: _Optional[int] = ..., loads: _Optional[int] = ..., fetches: _Optional[int] = ..., last_load_seconds: _Optional[float] = ..., last_fetch_seconds: _Optional[float] = ..., idle_seconds: _Optional[float] = ..., pinned: _Optional[bool] = ..., error: _Optional[str] = ...) -> None: ...

class EngineStats(_message.Message):
    __slots__ = ("lanes", "adapters", "total_pages", "free_pages", "kv_pages", "cached_pages", "adapter_pages", "steps", "preemptions", "recomputed_tokens", "prompt_tokens", "cached_tokens", "generated_tokens", "adapter_loads", "adapter_evictions", "step_seconds", "violations", "tenants", "step_predicted_seconds_total", "step_actual_seconds_total", "step_error_median", "step_margin", "host_total_pages", "host_used_pages", "pages_saved", "pages_restored", "preemptions_by_cause", "batch_urgency", "batch_share", "adapter_host_total_bytes", "adapter_host_used_bytes", "adapter_fetches", "adapter_fetch_failures", "adapter_fetch_seconds", "adapter_load_seconds", "adapter_host_evictions", "max_resident_adapters", "late_steps", "host_bound_steps", "proposed_tokens", "accepted_tokens", "step_sequences", "step_tokens", "yield_seconds", "kv_pages_in", "kv_pages_out", "kv_seconds_in", "kv_fetches", "kv_fetching", "kv_leases")
    class PreemptionsByCauseEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class KvFetchesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    LANES_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    KV_PAGES_FIELD_NUMBER: _ClassVar[int]
    CACHED_PAGES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_PAGES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_LOADS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    STEP_PREDICTED_SECONDS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    STEP_ACTUAL_SECONDS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    STEP_ERROR_MEDIAN_FIELD_NUMBER: _ClassVar[int]
    STEP_MARGIN_FIELD_NUMBER: _ClassVar[int]
    HOST_TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    HOST_USED_PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGES_SAVED_FIELD_NUMBER: _ClassVar[int]
    PAGES_RESTORED_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_BY_CAUSE_FIELD_NUMBER: _ClassVar[int]
    BATCH_URGENCY_FIELD_NUMBER: _ClassVar[int]
    BATCH_SHARE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_HOST_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_HOST_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FETCHES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FETCH_FAILURES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FETCH_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_LOAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_HOST_EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_RESIDENT_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    LATE_STEPS_FIELD_NUMBER: _ClassVar[int]
    HOST_BOUND_STEPS_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    YIELD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    KV_PAGES_IN_FIELD_NUMBER: _ClassVar[int]
    KV_PAGES_OUT_FIELD_NUMBER: _ClassVar[int]
    KV_SECONDS_IN_FIELD_NUMBER: _ClassVar[int]
    KV_FETCHES_FIELD_NUMBER: _ClassVar[int]
    KV_FETCHING_FIELD_NUMBER: _ClassVar[int]
    KV_LEASES_FIELD_NUMBER: _ClassVar[int]
    lanes: _containers.RepeatedCompositeFieldContainer[LaneStats]
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterStats]
    total_pages: int
    free_pages: int
    kv_pages: int
    cached_pages: int
    adapter_pages: int
    steps: int
    preemptions: int
    recomputed_tokens: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    adapter_loads: int
    adapter_evictions: int
    step_seconds: float
    violations: _containers.RepeatedScalarFieldContainer[str]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantStats]
    step_predicted_seconds_total: float
    step_actual_seconds_total: float
    step_error_median: float
    step_margin: float
    host_total_pages: int
    host_used_pages: int
    pages_saved: int
    pages_restored: int
    preemptions_by_cause: _containers.ScalarMap[str, int]
    batch_urgency: float
    batch_share: float
    adapter_host_total_bytes: int
    adapter_host_used_bytes: int
    adapter_fetches: int
    adapter_fetch_failures: int
    adapter_fetch_seconds: float
    adapter_load_seconds: float
    adapter_host_evictions: int
    max_resident_adapters: int
    late_steps: int
    host_bound_steps: int
    proposed_tokens: int
    accepted_tokens: int
    step_sequences: Buckets
    step_tokens: Buckets
    yield_seconds: Buckets
    kv_pages_in: int
    kv_pages_out: int
    kv_seconds_in: float
    kv_fetches: _containers.ScalarMap[str, int]
    kv_fetching: int
    kv_leases: int
    def __init__(self, lanes: _Optional[_Iterable[_Union[LaneStats, _Mapping]]] = ..., adapters: _Optional[_Iterable[_Union[AdapterStats, _Mapping]]] = ..., total_pages: _Optional[int] = ..., free_pages: _Optional[int] = ..., kv_pages: _Optional[int] = ..., cached_pages: _Optional[int] = ..., adapter_pages: _Optional[int] = ..., steps: _Optional[int] = ..., preemptions: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., adapter_loads: _Optional[int] = ..., adapter_evictions: _Optional[int] = ..., step_seconds: _Optional[float] = ..., violations: _Optional[_Iterable[str]] = ..., tenants: _Optional[_Iterable[_Union[TenantStats, _Mapping]]] = ..., step_predicted_seconds_total: _Optional[float] = ..., step_actual_seconds_total: _Optional[float] = ..., step_error_median: _Optional[float] = ..., step_margin: _Optional[float] = ..., host_total_pages: _Optional[int] = ..., host_used_pages: _Optional[int] = ..., pages_saved: _Optional[int] = ..., pages_restored: _Optional[int] = ..., preemptions_by_cause: _Optional[_Mapping[str, int]] = ..., batch_urgency: _Optional[float] = ..., batch_share: _Optional[float] = ..., adapter_host_total_bytes: _Optional[int] = ..., adapter_host_used_bytes: _Optional[int] = ..., adapter_fetches: _Optional[int] = ..., adapter_fetch_failures: _Optional[int] = ..., adapter_fetch_seconds: _Optional[float] = ..., adapter_load_seconds: _Optional[float] = ..., adapter_host_evictions: _Optional[int] = ..., max_resident_adapters: _Optional[int] = ..., late_steps: _Optional[int] = ..., host_bound_steps: _Optional[int] = ..., proposed_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., step_sequences: _Optional[_Union[Buckets, _Mapping]] = ..., step_tokens: _Optional[_Union[Buckets, _Mapping]] = ..., yield_seconds: _Optional[_Union[Buckets, _Mapping]] = ..., kv_pages_in: _Optional[int] = ..., kv_pages_out: _Optional[int] = ..., kv_seconds_in: _Optional[float] = ..., kv_fetches: _Optional[_Mapping[str, int]] = ..., kv_fetching: _Optional[int] = ..., kv_leases: _Optional[int] = ...) -> None: ...

class Buckets(_message.Message):
    __slots__ = ("bounds", "counts", "sum")
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    bounds: _containers.RepeatedScalarFieldContainer[float]
    counts: _containers.RepeatedScalarFieldContainer[int]
    sum: float
    def __init__(self, bounds: _Optional[_Iterable[float]] = ..., counts: _Optional[_Iterable[int]] = ..., sum: _Optional[float] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AdapterPlace(_message.Message):
    __slots__ = ("adapter", "tier")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    tier: AdapterTier
    def __init__(self, adapter: _Optional[str] = ..., tier: _Optional[_Union[AdapterTier, str]] = ...) -> None: ...

class LaneLoad(_message.Message):
    __slots__ = ("lane", "running", "waiting", "wait_seconds")
    LANE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    lane: Lane
    running: int
    waiting: int
    wait_seconds: float
    def __init__(self, lane: _Optional[_Union[Lane, str]] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., wait_seconds: _Optional[float] = ...) -> None: ...

class EngineNews(_message.Message):
    __slots__ = ("adapters", "lanes", "free_pages", "wait_seconds", "prompt_token_seconds", "copy_bytes_per_second", "read_bytes_per_second", "prefix_keys", "draining", "steps", "kv_bytes_per_second", "decoding", "decode_step_seconds", "prompt_share")
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COPY_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    PREFIX_KEYS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    DECODING_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SHARE_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterPlace]
    lanes: _containers.RepeatedCompositeFieldContainer[LaneLoad]
    free_pages: int
    wait_seconds: float
    prompt_token_seconds: float
    copy_bytes_per_second: float
    read_bytes_per_second: float
    prefix_keys: _containers.RepeatedScalarFieldContainer[int]
    draining: bool
    steps: int
    kv_bytes_per_second: float
    decoding: int
    decode_step_seconds: float
    prompt_share: float
    def __init__(self, adapters: _Optional[_Iterable[_Union[AdapterPlace, _Mapping]]] = ..., lanes: _Optional[_Iterable[_Union[LaneLoad, _Mapping]]] = ..., free_pages: _Optional[int] = ..., wait_seconds: _Optional[float] = ..., prompt_token_seconds: _Optional[float] = ..., copy_bytes_per_second: _Optional[float] = ..., read_bytes_per_second: _Optional[float] = ..., prefix_keys: _Optional[_Iterable[int]] = ..., draining: _Optional[bool] = ..., steps: _Optional[int] = ..., kv_bytes_per_second: _Optional[float] = ..., decoding: _Optional[int] = ..., decode_step_seconds: _Optional[float] = ..., prompt_share: _Optional[float] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("draining", "stop", "seconds")
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    draining: bool
    stop: bool
    seconds: float
    def __init__(self, draining: _Optional[bool] = ..., stop: _Optional[bool] = ..., seconds: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
