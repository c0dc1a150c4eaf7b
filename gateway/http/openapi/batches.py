"""The operations on batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct

from gateway.batches.record import Status
from gateway.batches.service import DEFAULT_PAGE, MAX_PAGE
from gateway.core.errors import Fault
from gateway.http.admin_batches import ADMIN_BATCHES, CANCEL_BATCH, WHICH
from gateway.http.batches import BATCH, BATCHES, CANCEL, BatchBody
from gateway.http.openapi.operation import Operation, admin


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
PAGE: Mapping[str, Mapping[str, Any]] = {
    "after": {"type": "string", "description": "Id of the last batch of the previous page."},
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": DEFAULT_PAGE},
}

BATCH_OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "POST",
        BATCHES,
        "Create a batch from an uploaded file.",
        "tenant",
        Batch,
        BatchBody,
        REGISTRY | {Fault.FILE_NOT_FOUND, Fault.INSUFFICIENT_QUOTA, Fault.INSUFFICIENT_STORAGE},
    ),
    Operation(
        "GET",
        BATCHES,
        "List the tenant's batches.",
        "tenant",
        BatchList,
        faults=REGISTRY | {Fault.INVALID_REQUEST},
        query=PAGE,
    ),
    Operation("GET", BATCH, "Get a batch.", "tenant", Batch, faults=ONE),
    Operation("POST", CANCEL, "Cancel a batch.", "tenant", Batch, faults=ONE | {Fault.BATCH_CONFLICT}),
    admin(
        "GET",
        ADMIN_BATCHES,
        "List batches of all tenants or of one: the unfinished ones, or all.",
        AdminBatches,
        REGISTRY | {Fault.INVALID_REQUEST},
        query={"tenant": {"type": "string"}, "which": {"enum": list(WHICH)}},
    ),
    admin("POST", CANCEL_BATCH, "Cancel a batch of any tenant.", AdminBatch, ONE | {Fault.BATCH_CONFLICT}),
)
