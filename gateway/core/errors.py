"""The table of all errors that a caller can receive, used by both HTTP and gRPC.

    ApiError
    ├── errors in the request
    │   ├── 400 INVALID_REQUEST, CONTEXT_LENGTH_EXCEEDED, INVALID_JSON, UNSUPPORTED_PARAMETER,
    │   │       PREVIOUS_RESPONSE_NOT_FOUND
    │   ├── 401 INVALID_API_KEY, KEY_EXPIRED
    │   ├── 403 FORBIDDEN, ADDRESS_NOT_ALLOWED, PERMISSION_DENIED
    │   ├── 404 MODEL_NOT_FOUND, TENANT_NOT_FOUND, KEY_NOT_FOUND, REQUEST_NOT_FOUND, FILE_NOT_FOUND,
    │   │       BATCH_NOT_FOUND, RESPONSE_NOT_FOUND, ADMIN_NOT_FOUND, ROUTE_NOT_FOUND
    │   ├── 405 METHOD_NOT_ALLOWED
    │   ├── 409 ADAPTER_EXISTS, ADAPTER_CONFLICT, ADAPTER_UNLOADED, TENANT_EXISTS, TENANT_CONFLICT, FILE_IN_USE,
    │   │       BATCH_CONFLICT, ENGINE_CONFLICT, ADMIN_EXISTS, ADMIN_CONFLICT
    │   ├── 413 REQUEST_TOO_LARGE
    │   └── 415 UNSUPPORTED_CODING
    ├── the tenant's own limits
    │   └── 429 RATE_LIMIT_EXCEEDED, INSUFFICIENT_QUOTA
    └── errors of the gateway
        ├── 500 INTERNAL, ENGINE_CRASHED, MODEL_OUTPUT_INVALID
        ├── 503 LANE_QUEUE_FULL, QUEUE_TIMEOUT, PREEMPTED, CANCELLED (by an administrator), ADAPTER_UNAVAILABLE,
        │       LIMITER_UNAVAILABLE, REGISTRY_UNAVAILABLE, STORAGE_UNAVAILABLE, ENGINE_UNAVAILABLE,
        │       UPSTREAM_UNAVAILABLE, AUDIT_UNAVAILABLE, OVERLOADED
        ├── 504 DEADLINE_EXCEEDED
        └── 507 INSUFFICIENT_STORAGE

A 429 always means the tenant's own limit; a lack of shared capacity is always a 503, and of disk space a 507.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

MAX_QUOTED = 256
"""Maximum characters of a caller's input that are quoted in an error message or a log line."""
MAX_MESSAGE = 2000
"""Maximum characters of an error message. Many quote the caller's input, and errors are stored: with batches in Redis,
with background responses, in result files."""


@dataclass(frozen=True, slots=True)
class FaultRow:
    """Wire representation of one error over HTTP and gRPC."""

    http_status: int
    grpc_status: str
    """Name of a member of `grpc.StatusCode`."""
    type: str
    """`error.type` of the JSON body. `code` is `error.code` of the same body."""
    code: str | None
    should_retry: bool | None = None
    """Value of the x-should-retry header, sent where a client's guess from the status alone would be wrong. None means
    that the header is not sent."""


class Fault(Enum):
    """The error table. A member's name says what happened; its `row` is the representation sent to callers."""

    row: FaultRow

    INVALID_REQUEST = (400, "INVALID_ARGUMENT", "invalid_request_error", None)
    CONTEXT_LENGTH_EXCEEDED = (400, "INVALID_ARGUMENT", "invalid_request_error", "context_length_exceeded")
    INVALID_JSON = (400, "INVALID_ARGUMENT", "invalid_request_error", "invalid_json")
    UNSUPPORTED_PARAMETER = (400, "INVALID_ARGUMENT", "invalid_request_error", "unsupported_parameter")
    PREVIOUS_RESPONSE_NOT_FOUND = (
        400,
        "FAILED_PRECONDITION",
        "invalid_request_error",
        "previous_response_not_found",
    )
    INVALID_API_KEY = (401, "UNAUTHENTICATED", "authentication_error", "invalid_api_key")
    KEY_EXPIRED = (401, "UNAUTHENTICATED", "authentication_error", "key_expired")
    FORBIDDEN = (403, "PERMISSION_DENIED", "permission_error", "forbidden")
    ADDRESS_NOT_ALLOWED = (403, "PERMISSION_DENIED", "permission_error", "address_not_allowed")
    PERMISSION_DENIED = (403, "PERMISSION_DENIED", "permission_error", "permission_denied")
    MODEL_NOT_FOUND = (404, "NOT_FOUND", "not_found_error", "model_not_found")
    TENANT_NOT_FOUND = (404, "NOT_FOUND", "not_found_error", "tenant_not_found")
    KEY_NOT_FOUND = (404, "NOT_FOUND", "not_found_error", "key_not_found")
    REQUEST_NOT_FOUND = (404, "NOT_FOUND", "not_found_error", "request_not_found")
    FILE_NOT_FOUND = (404, "NOT_FOUND", "not_found_error", "file_not_found")
    BATCH_NOT_FOUND = (404, "NOT_FOUND", "not_found_error", "batch_not_found")
    RESPONSE_NOT_FOUND = (404, "NOT_FOUND", "not_found_error", "response_not_found")
    ADMIN_NOT_FOUND = (404, "NOT_FOUND", "not_found_error", "admin_not_found")
    ROUTE_NOT_FOUND = (404, "UNIMPLEMENTED", "not_found_error", None)
    METHOD_NOT_ALLOWED = (405, "UNIMPLEMENTED", "invalid_request_error", None)
    ADAPTER_EXISTS = (409, "ALREADY_EXISTS", "conflict_error", "adapter_conflict", False)
    ADAPTER_CONFLICT = (409, "FAILED_PRECONDITION", "conflict_error", "adapter_conflict", False)
    ADAPTER_UNLOADED = (409, "ABORTED", "conflict_error", "adapter_unloaded", False)
    TENANT_EXISTS = (409, "ALREADY_EXISTS", "conflict_error", "tenant_conflict", False)
    TENANT_CONFLICT = (409, "FAILED_PRECONDITION", "conflict_error", "tenant_conflict", False)
    FILE_IN_USE = (409, "FAILED_PRECONDITION", "conflict_error", "file_in_use", False)
    BATCH_CONFLICT = (409, "FAILED_PRECONDITION", "conflict_error", "batch_conflict", False)
    ENGINE_CONFLICT = (409, "ALREADY_EXISTS", "conflict_error", "engine_conflict", False)
    ADMIN_EXISTS = (409, "ALREADY_EXISTS", "conflict_error", "admin_conflict", False)
    ADMIN_CONFLICT = (409, "FAILED_PRECONDITION", "conflict_error", "admin_conflict", False)
    REQUEST_TOO_LARGE = (413, "INVALID_ARGUMENT", "invalid_request_error", "request_too_large")
    UNSUPPORTED_CODING = (415, "INVALID_ARGUMENT", "invalid_request_error", "unsupported_coding")
    RATE_LIMIT_EXCEEDED = (429, "RESOURCE_EXHAUSTED", "requests", "rate_limit_exceeded")
    INSUFFICIENT_QUOTA = (429, "RESOURCE_EXHAUSTED", "insufficient_quota", "insufficient_quota", False)
    INTERNAL = (500, "INTERNAL", "server_error", "internal_error")
    ENGINE_CRASHED = (500, "INTERNAL", "server_error", "engine_crashed", False)
    MODEL_OUTPUT_INVALID = (500, "INTERNAL", "server_error", "model_output_invalid", False)
    LANE_QUEUE_FULL = (503, "UNAVAILABLE", "service_unavailable", "lane_queue_full")
    QUEUE_TIMEOUT = (503, "UNAVAILABLE", "service_unavailable", "queue_timeout")
    PREEMPTED = (503, "UNAVAILABLE", "service_unavailable", "preempted")
    CANCELLED = (503, "ABORTED", "service_unavailable", "preempted", False)
    ADAPTER_UNAVAILABLE = (503, "UNAVAILABLE", "service_unavailable", "adapter_unavailable")
    LIMITER_UNAVAILABLE = (503, "UNAVAILABLE", "service_unavailable", "limiter_unavailable")
    REGISTRY_UNAVAILABLE = (503, "UNAVAILABLE", "service_unavailable", "registry_unavailable")
    STORAGE_UNAVAILABLE = (503, "UNAVAILABLE", "service_unavailable", "storage_unavailable", True)
    ENGINE_UNAVAILABLE = (503, "UNAVAILABLE", "service_unavailable", "engine_unavailable")
    UPSTREAM_UNAVAILABLE = (503, "UNAVAILABLE", "service_unavailable", "upstream_unavailable")
    AUDIT_UNAVAILABLE = (503, "UNAVAILABLE", "service_unavailable", "audit_unavailable")
    OVERLOADED = (503, "UNAVAILABLE", "service_unavailable", "overloaded")
    DEADLINE_EXCEEDED = (504, "DEADLINE_EXCEEDED", "server_error", "deadline_exceeded")
    INSUFFICIENT_STORAGE = (507, "RESOURCE_EXHAUSTED", "server_error", "insufficient_storage", False)

    def __init__(
        self, http_status: int, grpc_status: str, type: str, code: str | None, should_retry: bool | None = None
    ) -> None:
        self.row = FaultRow(http_status, grpc_status, type, code, should_retry)


@dataclass(eq=False, slots=True)
class ApiError(Exception):
    """An expected error that is sent to the caller. Any other exception is a bug and is sent as INTERNAL."""

    fault: Fault
    message: str
    param: str | None = None
    """The request field that caused the error. None means that no single field did."""
    retry_after: float | None = None
    """Seconds until the same request can succeed. None means that this is unknown or that a retry does not help."""
    limit_kind: Literal["requests", "tokens"] | None = None
    """Kind of limit that refused the request, set for RATE_LIMIT_EXCEEDED; it replaces the error's type."""
    extra_headers: Mapping[str, str] = field(default_factory=dict)
    """Additional response headers: rate limit headers, Allow, WWW-Authenticate."""
    detail_code: str | None = None
    """`error.code` of the JSON body where OpenAI has a narrower one than the fault: what is wrong with a value."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Details for the request log and gRPC's ErrorInfo, for example the scope and the limit that refused."""

    def __post_init__(self) -> None:
        """Cut the message to MAX_MESSAGE characters and the field's name to MAX_QUOTED."""
        self.message = clip(self.message, MAX_MESSAGE)
        self.param = None if self.param is None else clip(self.param, MAX_QUOTED)

    def __str__(self) -> str:
        return self.message

    @property
    def reason(self) -> str:
        """The message for logs, followed by the exception's `__cause__`, if any. Callers do not receive the cause."""
        return f"{self.message}: {self.__cause__}" if self.__cause__ else self.message

    @property
    def http_status(self) -> int:
        return self.fault.row.http_status

    @property
    def grpc_status(self) -> str:
        return self.fault.row.grpc_status

    @property
    def type(self) -> str:
        return self.limit_kind or self.fault.row.type

    @property
    def code(self) -> str | None:
        return self.fault.row.code

    @property
    def should_retry(self) -> bool | None:
        return self.fault.row.should_retry

    def body(self) -> dict[str, Any]:
        """Return the JSON body that OpenAI clients parse: `error` with its message, type, param and code."""
        code = self.detail_code or self.code
        error = {"message": self.message, "type": self.type, "param": self.param, "code": code}
        return {"error": error}

    def headers(self) -> dict[str, str]:
        """Return the response headers, with lower-case names: `extra_headers`; if `retry_after` is set, retry-after in
        seconds and retry-after-ms, rounded up to at least 1; and x-should-retry if the fault has it."""
        headers = dict(self.extra_headers)
        if self.retry_after is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after)))
            headers["retry-after-ms"] = str(max(1, math.ceil(self.retry_after * 1000)))
        if self.should_retry is not None:
            headers["x-should-retry"] = "true" if self.should_retry else "false"
        return headers


def clip(text: str, most: int) -> str:
    """Return a text of at most `most` characters, which ends with `...` if it was cut."""
    return text if len(text) <= most else text[: most - 3] + "..."


def invalid_request(message: str, param: str | None = None, detail_code: str | None = None) -> ApiError:
    return ApiError(Fault.INVALID_REQUEST, message, param, detail_code=detail_code)


def unsupported_parameter(param: str, why: str = "is not supported") -> ApiError:
    return ApiError(Fault.UNSUPPORTED_PARAMETER, f"{param} {why}", param)


def context_length_exceeded(num_tokens: int, max_tokens: int, param: str = "messages") -> ApiError:
    """Return the error for a request that needs `num_tokens` tokens where the model's context holds `max_tokens`.

    The first half of the message is the wording of OpenAI and vLLM, by which litellm and other clients tell this error
    from any other 400. `param` is the request field to blame. The metadata has both numbers, for other wordings.
    """
    message = f"This model's maximum context length is {max_tokens} tokens, and the request needs {num_tokens}"
    numbers = {"tokens": str(num_tokens), "max_tokens": str(max_tokens)}
    return ApiError(Fault.CONTEXT_LENGTH_EXCEEDED, message, param, metadata=numbers)


def invalid_api_key() -> ApiError:
    message = "missing or unknown API key; send it as 'Authorization: Bearer <key>' or 'x-api-key: <key>'"
    return ApiError(Fault.INVALID_API_KEY, message, extra_headers={"www-authenticate": "Bearer"})


def key_expired() -> ApiError:
    message = "this API key has expired; ask your operator for a new one"
    return ApiError(Fault.KEY_EXPIRED, message, extra_headers={"www-authenticate": "Bearer"})


def address_not_allowed(address: object) -> ApiError:
    """Return the error for a key that is used from elsewhere than its networks. `address` is None if it is unknown."""
    where = "an address that is unknown" if address is None else f"the address {address}"
    return ApiError(Fault.ADDRESS_NOT_ALLOWED, f"this API key must not be used from {where}")


def forbidden(message: str) -> ApiError:
    return ApiError(Fault.FORBIDDEN, message)


def permission_denied(message: str) -> ApiError:
    """Return the error for an administrator whose role does not suffice. `message` names the role needed."""
    return ApiError(Fault.PERMISSION_DENIED, message)


def model_not_found(name: str) -> ApiError:
    """Return the error for an unknown model. The message is the same for a model that the tenant may not use."""
    message = f"the model {name[:MAX_QUOTED]!r} does not exist or you do not have access to it"
    return ApiError(Fault.MODEL_NOT_FOUND, message, "model")


def tenant_not_found(name: str) -> ApiError:
    """Return the error for an unknown tenant. Only administrators can receive it."""
    return ApiError(Fault.TENANT_NOT_FOUND, f"there is no tenant {name[:80]!r}", "tenant")


def file_not_found(file_id: str) -> ApiError:
    """Return the error for an unknown file. The message is the same for a file that another tenant owns."""
    return ApiError(Fault.FILE_NOT_FOUND, f"there is no file {file_id[:MAX_QUOTED]!r}", "file_id")


def response_not_found(response_id: str) -> ApiError:
    """Return the error for an unknown stored response. The message is the same for one that another tenant owns."""
    return ApiError(
        Fault.RESPONSE_NOT_FOUND, f"there is no stored response {response_id[:MAX_QUOTED]!r}", "response_id"
    )


def route_not_found(method: str, path: str, instead: str | None = None) -> ApiError:
    """Return the error for an unknown route. `instead` says why the route is absent, or what to use in its place."""
    message = f"{method} {path} is not supported: {instead}" if instead else f"unknown route: {method} {path}"
    return ApiError(Fault.ROUTE_NOT_FOUND, message)


def method_not_allowed(method: str, path: str, allowed: str, instead: str | None = None) -> ApiError:
    """Return the error for an unsupported method. `allowed` holds the methods of the path, separated by commas.
    `instead` says what to use in place of the path."""
    message = f"{method} is not allowed on {path}; {instead or f'allowed: {allowed}'}"
    return ApiError(Fault.METHOD_NOT_ALLOWED, message, extra_headers={"allow": allowed})


def request_too_large(max_bytes: int) -> ApiError:
    return ApiError(Fault.REQUEST_TOO_LARGE, f"the request body is larger than {max_bytes} bytes")


def unsupported_coding(name: str, known: str) -> ApiError:
    """Return the error for a body that is compressed in an unsupported way. `known` holds the codings that are
    supported, separated by commas."""
    message = f"content-encoding {name[:80]!r} is not supported; send the body uncompressed, or in one of {known}"
    return ApiError(Fault.UNSUPPORTED_CODING, message, extra_headers={"accept-encoding": known})


def unavailable(fault: Fault, message: str, retry_after: float = 1.0) -> ApiError:
    """Return a 503 error, whose `fault` the caller chooses: a retry after `retry_after` seconds may succeed."""
    return ApiError(fault, message, retry_after=retry_after)


def internal(request_id: str) -> ApiError:
    """Return the INTERNAL error for a bug in the gateway. Its message has only the request id, under which the log has
    the details."""
    return ApiError(Fault.INTERNAL, f"internal error; request id {request_id}")
