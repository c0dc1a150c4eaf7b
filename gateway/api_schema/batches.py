"""Batches: what tenants and operators send and get, and the operations."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from gateway.api_schema.operation import Operation, admin
from gateway.core.errors import Fault

BATCHES = "/v1/batches"
BATCH = BATCHES + "/{batch_id}"
ADMIN_BATCHES = "/admin/v1/batches"
DEFAULT_PAGE, MAX_PAGE = 20, 100
WHICH = ("unfinished", "all")
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]


class OutputExpiry(Struct):
    """Lifetime of the output files that a batch writes."""

    anchor: Literal["created_at"]
    """The time from which `seconds` counts: the creation of each output file, not of the batch."""
    seconds: int


class BatchBody(Struct, kw_only=True):
    """Body of POST /v1/batches."""

    endpoint: str
    input_file_id: str
    completion_window: str
    """Time in which the batch must end, as a duration such as 24h, 90s, 30m or 7d."""
    metadata: dict[str, str] | None = None
    output_expires_after: OutputExpiry | None = None


class BatchLineError(Struct):
    code: str
    message: str
    param: str | None
    line: int | None
    """Number of the line, from 1."""


class BatchErrors(Struct):
    object: Literal["list"]
    data: list[BatchLineError]


class BatchCounts(Struct):
    total: int
    completed: int
    failed: int


class BatchInputDetails(Struct):
    cached_tokens: int


class BatchOutputDetails(Struct):
    reasoning_tokens: int


class BatchUsage(Struct):
    input_tokens: int
    input_tokens_details: BatchInputDetails
    output_tokens: int
    output_tokens_details: BatchOutputDetails
    total_tokens: int


class Batch(Struct):
    """A batch. Times are in seconds since 1970."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    usage: BatchUsage
    metadata: dict[str, str] | None
    eta_seconds: float | None
    """Estimated seconds until the batch's last line has ended; null if no estimate is possible."""


class AdminBatch(Batch):
    tenant: str = ""


class AdminBatches(Struct):
    batches: list[AdminBatch]


class BatchList(Struct):
    object: Literal["list"]
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


REGISTRY = frozenset({Fault.REGISTRY_UNAVAILABLE})
ONE = REGISTRY | {Fault.BATCH_NOT_FOUND}
CANCELLED = ONE | {Fault.BATCH_CONFLICT}
PAGE: dict[str, dict[str, Any]] = {
    "after": {"type": "string", "description": "Id of the last batch of the previous page."},
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": DEFAULT_PAGE},
}

CREATE = Operation(
    "POST",
    BATCHES,
    "Create a batch from an uploaded file.",
    "tenant",
    Batch,
    BatchBody,
    REGISTRY | {Fault.FILE_NOT_FOUND, Fault.INSUFFICIENT_QUOTA, Fault.INSUFFICIENT_STORAGE},
)
LIST = Operation(
    "GET",
    BATCHES,
    "List the tenant's batches.",
    "tenant",
    BatchList,
    faults=REGISTRY | {Fault.INVALID_REQUEST},
    query=PAGE,
)
GET = Operation("GET", BATCH, "Get a batch.", "tenant", Batch, faults=ONE)
CANCEL = Operation("POST", BATCH + "/cancel", "Cancel a batch.", "tenant", Batch, faults=CANCELLED)
LIST_ALL = admin(
    "GET",
    ADMIN_BATCHES,
    "List batches of all tenants or of one: the unfinished ones, or all.",
    AdminBatches,
    REGISTRY | {Fault.INVALID_REQUEST},
    query={"tenant": {"type": "string"}, "which": {"enum": list(WHICH)}},
)
CANCEL_ANY = admin(
    "POST", ADMIN_BATCHES + "/{tenant}/{batch_id}/cancel", "Cancel a batch of any tenant.", AdminBatch, CANCELLED
)

OPERATIONS: tuple[Operation[Any], ...] = (CREATE, LIST, GET, CANCEL, LIST_ALL, CANCEL_ANY)
