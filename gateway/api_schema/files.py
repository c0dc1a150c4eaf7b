"""Files: what tenants send and get, and the operations."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field

from gateway.api_schema.operation import Operation
from gateway.core.errors import Fault

FILES = "/v1/files"
FILE = FILES + "/{file_id}"
ANCHOR, SECONDS = "expires_after[anchor]", "expires_after[seconds]"
MIN_EXPIRY, MAX_EXPIRY = 3600, 30 * 86_400
"""OpenAI's bounds of `expires_after`, in seconds. Files expire after the maximum unless the caller asks for less."""
MAX_PAGE = 10_000

Purpose = Literal["batch", "batch_output"]


class FileUpload(Struct):
    """Form that uploads a file."""

    file: Annotated[str, Meta(extra_json_schema={"format": "binary"})]
    purpose: Literal["batch"]
    anchor: Literal["created_at"] | UnsetType = field(default=UNSET, name=ANCHOR)
    seconds: Annotated[int, Meta(ge=MIN_EXPIRY, le=MAX_EXPIRY)] | UnsetType = field(default=UNSET, name=SECONDS)
    """Lifetime of the file in seconds, counted from the start of the upload."""


class File(Struct):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    """Unix time in seconds."""
    expires_at: int | None
    filename: str
    purpose: Purpose
    status: Literal["processed"]


class FileList(Struct):
    object: Literal["list"]
    data: list[File]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(Struct):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


REGISTRY = frozenset({Fault.REGISTRY_UNAVAILABLE})
ONE = REGISTRY | {Fault.FILE_NOT_FOUND}
BROUGHT = REGISTRY | {Fault.STORAGE_UNAVAILABLE, Fault.INSUFFICIENT_QUOTA, Fault.INSUFFICIENT_STORAGE}
PAGE: dict[str, dict[str, Any]] = {
    "purpose": {"type": "string"},
    "after": {"type": "string"},
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE},
    "order": {"type": "string", "enum": ["asc", "desc"]},
}

UPLOAD = Operation(
    "POST", FILES, "Upload a file.", "tenant", File, FileUpload, BROUGHT, body_type="multipart/form-data"
)
LIST = Operation(
    "GET", FILES, "List uploaded files.", "tenant", FileList, faults=REGISTRY | {Fault.INVALID_REQUEST}, query=PAGE
)
GET = Operation("GET", FILE, "Get a file's metadata.", "tenant", File, faults=ONE)
DELETE = Operation("DELETE", FILE, "Delete a file.", "tenant", DeletedFile, faults=ONE | {Fault.FILE_IN_USE})
DOWNLOAD: Operation[Any] = Operation(
    "GET",
    FILE + "/content",
    "Download a file's content.",
    "tenant",
    "application/octet-stream",
    faults=ONE | {Fault.STORAGE_UNAVAILABLE},
)

OPERATIONS: tuple[Operation[Any], ...] = (UPLOAD, LIST, GET, DELETE, DOWNLOAD)
