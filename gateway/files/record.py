"""What is known of a file, and how its name and its object's name are made."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from gateway.core.errors import file_not_found

BATCH: Final = "batch"
"""Of what callers bring: requests, line by line."""
BATCH_OUTPUT: Final = "batch_output"
"""Of what jobs have answered."""
FILE_ID = re.compile(r"file-[0-9a-f]{24}")
OBJECTS: Final = "files/"
"""What the names of all files' objects begin with; then follow the tenant and the upload's token."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file, whole and charged."""

    id: str
    tenant: str
    bytes: int
    created_at: int
    """Unix seconds, of Redis's clock, as all times here."""
    filename: str
    purpose: str
    expires_at: int | None
    token: str
    """Of the upload that brought it: the last part of its object's name."""

    @property
    def object(self) -> str:
        return object_of(self.tenant, self.token)

    def shown(self) -> dict[str, Any]:
        """OpenAI's file object."""
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
    """Raises ApiError: FILE_NOT_FOUND, no file can have this id."""
    if not FILE_ID.fullmatch(file_id):
        raise file_not_found(file_id)
    return file_id


def encode(record: FileRecord) -> bytes:
    return msgspec.json.encode(record)


def decode(text: bytes) -> FileRecord:
    return msgspec.json.decode(text, type=FileRecord)
