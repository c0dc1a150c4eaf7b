"""Data model of a batch, its fields in Redis and its JSON for OpenAI clients, independent of the storage."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import msgspec

from gateway.api_schema import batches as api
from gateway.api_schema.batches import Status
from gateway.core.errors import ApiError, Fault, invalid_request

BatchEndpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
Outcome = Literal["completed", "expired", "cancelled"]

ENDED: frozenset[Status] = frozenset(("failed", "completed", "expired", "cancelled"))
"""Final statuses: a batch in one of them is never changed again."""
FOLDERS = "batches/"
"""Prefix of the names of all batches' objects in the storage."""
BATCH_ID = re.compile(r"batch_[0-9a-f]{24}")
WINDOW = re.compile(r"([1-9][0-9]{0,6})([smhd])")
UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
MAX_WINDOW_SECONDS = 30 * 86_400
MAX_PAIRS, MAX_KEY, MAX_VALUE = 16, 64, 512
"""Bounds of metadata: number of pairs, characters of a key, characters of a value."""


@dataclass(frozen=True, slots=True)
class BatchError:
    """An error that made a batch fail, in input line `line` or (None) as a whole. `param` is the invalid field."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None
    """Number of the line in the input file, from 1. None means the whole file."""

    def json(self) -> dict[str, Any]:
        return {"code": self.code, "message": self.message, "param": self.param, "line": self.line}


@dataclass(frozen=True, slots=True)
class Tally:
    """Totals over a batch's ended lines: numbers completed and failed, tokens and device time of the former."""

    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    """Input tokens that were found in the prefix cache. They are part of `input_tokens`."""
    output_tokens: int = 0
    device_us: int = 0
    """Device time of the completed lines, in microseconds."""


@dataclass(frozen=True, slots=True)
class NewBatch:
    """A batch as a tenant requests it, with the id that it will have."""

    id: str
    tenant: str
    key_id: str
    """Id of the key that the batch was requested with. Its lines are charged to this key."""
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: Mapping[str, str] | None = None
    output_expires_after: int | None = None
    """Seconds after which the output files expire. None means MAX_EXPIRY (`gateway.files.service`)."""

    @property
    def window_s(self) -> int:
        """Length of the completion window in seconds. Raises ApiError like `window_seconds`."""
        return window_seconds(self.completion_window)


@dataclass(frozen=True, slots=True)
class Batch(NewBatch):
    """A batch with its state. Times are Unix seconds on Redis's clock; `STATUS_at` of None means that the batch never
    had that status. `expires_at` is the end of the completion window."""

    status: Status = "validating"
    created_at: int = 0
    expires_at: int = 0
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    model: str | None = None
    """The model that all lines name. None means that they name several models, or that the lines are not known yet."""
    model_lines: tuple[tuple[str, int], ...] = ()
    """Base models and virtual models of the lines with their numbers of lines, in the order of positions. Empty until
    the input is validated, and if an older gateway has validated it."""
    total: int = 0
    """Number of lines; 0 until the input is validated."""
    tally: Tally = Tally()
    errors: tuple[BatchError, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    outcome: Outcome | None = None
    """The status with which the batch will end. It is None until finalizing begins."""
    shard_size: int = 0
    """Number of positions in each shard; the last shard may have fewer. 0 until the input is validated."""
    index_fence: int = 0
    """Fence of the lease under which the input was validated; 0 until then."""

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    @property
    def folder(self) -> str:
        """Prefix of the names of the batch's objects in the storage, with a slash at the end."""
        return f"{FOLDERS}{self.id}/"

    def index_name(self, fence: int) -> str:
        """Return the name of the index object, which maps positions to lines, as written under the lease with this
        `fence`. Each validating lease writes its own, because adapters, and so the order of lines, may change between
        validations."""
        return f"{self.folder}index-{fence}"


TIMES = tuple(item.name for item in fields(Batch) if item.name.endswith("_at"))
COUNTS = tuple(item.name for item in fields(Tally))


def new_batch_id() -> str:
    return f"batch_{secrets.token_hex(12)}"


def result_file_id(batch_id: str, kind: Literal["output", "error"]) -> str:
    """Return the id of a batch's output or error file, derived from the batch id: finalizing twice writes one file."""
    return "file-" + hashlib.sha256(f"{batch_id}/{kind}".encode()).hexdigest()[:24]


def window_seconds(window: str) -> int:
    """Parse a completion window like 24h, 90s, 30m or 7d into seconds. Raises ApiError (INVALID_REQUEST) for other
    text, for 0 and for more than 30d."""
    match = WINDOW.fullmatch(window)
    seconds = int(match[1]) * UNIT_SECONDS[match[2]] if match else 0
    if not 0 < seconds <= MAX_WINDOW_SECONDS:
        message = "completion_window must be like 24h, 90s, 30m or 7d, and at most 30d"
        raise invalid_request(message, "completion_window")
    return seconds


def check_metadata(metadata: Mapping[str, str] | None) -> None:
    """Raise ApiError (INVALID_REQUEST) if metadata has too many pairs, an empty or long key or a long value."""
    if metadata is None:
        return
    if len(metadata) > MAX_PAIRS:
        raise invalid_request(f"metadata has at most {MAX_PAIRS} pairs", "metadata")
    for key, value in metadata.items():
        if not key or len(key) > MAX_KEY or len(value) > MAX_VALUE:
            message = f"keys of metadata have 1 to {MAX_KEY} characters, values up to {MAX_VALUE}"
            raise invalid_request(message, "metadata")


def batch_not_found(batch_id: str) -> ApiError:
    """Return the error for a batch id that does not exist or is another tenant's. The message does not tell which."""
    return ApiError(Fault.BATCH_NOT_FOUND, f"there is no batch {batch_id[:64]!r}", "batch_id")


def shown_batch(batch: Batch, eta_seconds: float | None = None) -> api.Batch:
    """Return the batch as OpenAI's batch object."""
    tally = batch.tally
    errors = api.BatchErrors("list", [api.BatchLineError(**asdict(error)) for error in batch.errors])
    return api.Batch(
        id=batch.id,
        object="batch",
        endpoint=batch.endpoint,
        model=batch.model,
        errors=errors if batch.errors else None,
        input_file_id=batch.input_file_id,
        completion_window=batch.completion_window,
        status=batch.status,
        output_file_id=batch.output_file_id,
        error_file_id=batch.error_file_id,
        **{name: getattr(batch, name) for name in TIMES},
        request_counts=api.BatchCounts(batch.total, tally.completed, tally.failed),
        usage=_usage(tally),
        metadata=None if batch.metadata is None else dict(batch.metadata),
        eta_seconds=eta_seconds,
    )


def _usage(tally: Tally) -> api.BatchUsage:
    return api.BatchUsage(
        input_tokens=tally.input_tokens,
        input_tokens_details=api.BatchInputDetails(tally.cached_tokens),
        output_tokens=tally.output_tokens,
        output_tokens_details=api.BatchOutputDetails(0),
        total_tokens=tally.input_tokens + tally.output_tokens,
    )


def new_fields(batch: NewBatch) -> list[str | bytes | int]:
    """Return the fields of a new batch's Redis hash: names, each followed by its value. None is left out."""
    values = {item.name: getattr(batch, item.name) for item in fields(NewBatch)}
    values["metadata"] = None if batch.metadata is None else msgspec.json.encode(batch.metadata)
    return [word for name, value in values.items() if value is not None for word in (name, value)]


def read_fields(words: Mapping[bytes, bytes]) -> Batch:
    """Read a batch from its Redis hash, which has the fields of `new_fields` and those that scripts added later."""
    texts = {key.decode(): value.decode() for key, value in words.items()}
    values: dict[str, Any] = {item.name: texts[item.name] for item in fields(Batch) if item.name in texts}
    for name in (*TIMES, "output_expires_after", "total", "shard_size", "index_fence"):
        if name in values:
            values[name] = int(values[name])
    if "metadata" in values:
        values["metadata"] = msgspec.json.decode(values["metadata"])
    if "model_lines" in values:
        values["model_lines"] = msgspec.json.decode(values["model_lines"], type=tuple[tuple[str, int], ...])
    if "errors" in values:
        values["errors"] = msgspec.json.decode(values["errors"], type=tuple[BatchError, ...])
    return Batch(**values, tally=Tally(**{name: int(texts.get(name, 0)) for name in COUNTS}))
