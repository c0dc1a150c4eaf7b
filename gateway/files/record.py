"""Records of files, and the names of files and of their objects."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from gateway.core.errors import file_not_found

BATCH: Final = "batch"
"""Purpose of files that callers upload: input of batches, one request per line."""
BATCH_OUTPUT: Final = "batch_output"
"""Purpose of the output and error files that batches write."""
FILE_ID = re.compile(r"file-[0-9a-f]{24}")
OBJECTS: Final = "files/"
"""Prefix of the names of all files' objects. The tenant, a slash and the upload's token follow."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A complete file that its tenant is charged for. Times are Unix seconds on Redis's clock (`expires_at` None:
    never)."""

    id: str
    tenant: str
    bytes: int
    created_at: int
    """Time at which the upload of the file began."""
    filename: str
    purpose: str
    expires_at: int | None
    token: str
    """Token of the upload that created the file. It is the last part of the name of the file's object."""

    @property
    def object_name(self) -> str:
        return object_of(self.tenant, self.token)

    def to_openai(self) -> dict[str, Any]:
        """Return the file as OpenAI's file object, for JSON."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


def object_of(tenant: str, token: str) -> str:
    return f"{OBJECTS}{tenant}/{token}"


def new_file_id() -> str:
    return f"file-{secrets.token_hex(12)}"


def checked_id(file_id: str) -> str:
    """Return `file_id` unchanged. Raises ApiError (FILE_NOT_FOUND) if it is malformed, so that no file can have it."""
    if not FILE_ID.fullmatch(file_id):
        raise file_not_found(file_id)
    return file_id


def encode(record: FileRecord) -> bytes:
    return msgspec.json.encode(record)


def decode(text: bytes) -> FileRecord:
    return msgspec.json.decode(text, type=FileRecord)
