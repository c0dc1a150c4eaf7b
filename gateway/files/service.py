"""Operations on files of tenants: upload, store, list, read and delete, within each tenant's quota."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from gateway.api_schema.files import MAX_EXPIRY, MAX_PAGE, MIN_EXPIRY
from gateway.core.errors import ApiError, invalid_request
from gateway.core.space import SpaceUse
from gateway.core.tenant_room import TenantRoom
from gateway.files.record import BATCH, BATCH_OUTPUT, FileRecord, checked_id, new_file_id
from gateway.files.registry import (
    AT_ONCE,
    UNBOUNDED,
    FileQuota,
    FileRegistry,
    FileUse,
    Reservation,
    refuses_writes,
    too_many_bytes,
)
from gateway.files.storage import Storage
from gateway.files.upload import Upload, uploading

DAY = 86_400
PIN_SECONDS = 60.0 * DAY
"""Seconds after which a pin ends if its holder died. It is longer than any batch."""
RECOVERY_SECONDS, RECOVERY_TRIES = 3.0, 6
"""Seconds that Redis may take to accept writes again once its disk has room, and the number of attempts meanwhile. It
tries once a second."""
MOST_DOWNLOADS = 16
"""Maximum number of files that one tenant downloads at the same time from one gateway process."""
MAX_FILENAME = 512


@dataclass(frozen=True, slots=True)
class FileLimits:
    """Maximum size of one file in bytes, and the maximum total bytes and number of files of one tenant."""

    max_file_bytes: int
    tenant_bytes: int
    tenant_files: int

    @property
    def quota(self) -> FileQuota:
        return FileQuota(self.tenant_bytes, self.tenant_files)


@dataclass(frozen=True, slots=True)
class FilePage:
    """A page of a list of files; `has_more` is True if more files follow."""

    data: list[FileRecord]
    has_more: bool


class Files:
    """Operations on files, one object per gateway process. Every method raises ApiError: REGISTRY_UNAVAILABLE if Redis
    is away, STORAGE_UNAVAILABLE if the storage is.

    Callers see only the files of their own `tenant`: others give the same FILE_NOT_FOUND as files that do not exist.
    """

    def __init__(self, storage: Storage, registry: FileRegistry, limits: FileLimits) -> None:
        self.storage, self.registry, self.limits = storage, registry, limits
        self._downloads = TenantRoom(MOST_DOWNLOADS, "you download {held} files already; read one to its end first")

    async def create(
        self,
        tenant: str,
        filename: str,
        purpose: str,
        chunks: AsyncIterator[bytes],
        expires_after: int | None = None,
    ) -> FileRecord:
        """Store the content `chunks` as a new file of the tenant, in constant memory, and return its record. `purpose`
        must be BATCH. The file expires `expires_after` seconds after the upload began (None: MAX_EXPIRY). Raises
        ApiError: INVALID_REQUEST (an argument, or no content), REQUEST_TOO_LARGE, INSUFFICIENT_QUOTA,
        INSUFFICIENT_STORAGE; neither bytes nor charges remain then."""
        check_purpose(purpose)
        async with self.receiving(tenant, chunks) as upload:
            return await keep_upload(upload, filename, purpose, expires_after)

    @asynccontextmanager
    async def receiving(
        self, tenant: str, chunks: AsyncIterator[bytes], *, expected: int = 0
    ) -> AsyncGenerator[Upload, None]:
        """Receive, charge and store a file's content; yield the complete upload for `keep_upload`. An upload that was
        not kept is deleted and refunded. `expected`, a minimum of the size in bytes, is charged first.

        Raises ApiError: REQUEST_TOO_LARGE, INSUFFICIENT_QUOTA, INSUFFICIENT_STORAGE.
        """
        file_id = new_file_id()
        upload = Upload(self.storage, self.registry, Reservation(tenant, file_id, file_id, self.limits.quota))
        async with uploading(upload, chunks, expected, self.limits.max_file_bytes):
            yield upload

    async def adopt(
        self,
        tenant: str,
        file_id: str,
        filename: str,
        chunks: AsyncIterator[bytes],
        expires_after: int | None = None,
        *,
        expected: int = 0,
    ) -> FileRecord:
        """Store a result file of a batch under a given id, and return its record. It is charged, but not refused for
        its size or the quota. It expires `expires_after` seconds after the beginning of the upload (None: MAX_EXPIRY).
        `expected` is a minimum of its size in bytes. Raises ApiError: INSUFFICIENT_STORAGE.

        The first upload with an id makes the file; later ones return that file's record. `chunks` are read in any case.
        """
        token = f"{checked_id(file_id)}.{secrets.token_hex(4)}"
        upload = Upload(
            self.storage, self.registry, Reservation(tenant, file_id, token, UNBOUNDED), use=SpaceUse.RESULT
        )
        async with uploading(upload, chunks, expected):
            return await upload.keep(filename, BATCH_OUTPUT, expires_after or MAX_EXPIRY)

    async def get(self, tenant: str, file_id: str) -> FileRecord:
        """Return the record of a tenant's file. Raises ApiError: FILE_NOT_FOUND, also if it has expired."""
        return await self.registry.find(tenant, checked_id(file_id))

    async def list(
        self,
        tenant: str,
        *,
        purpose: str | None = None,
        after: str | None = None,
        limit: int = MAX_PAGE,
        newest_first: bool = True,
    ) -> FilePage:
        """Return at most `limit` of a tenant's files with the purpose (None: any) after the file `after`, which may be
        deleted, by upload time: `newest_first`, else oldest first. Raises ApiError (INVALID_REQUEST) if there was no
        such `after`."""
        ids = await self.registry.ids(tenant, after or "", newest_first)
        if ids is None:
            raise invalid_request("after must be the id of a file", "after")
        matches: list[FileRecord] = []
        for start in range(0, len(ids), AT_ONCE):
            records = await self.registry.read(tenant, ids[start : start + AT_ONCE])
            matches += [record for record in records if purpose in (None, record.purpose)]
            if len(matches) > limit:
                break
        return FilePage(matches[:limit], len(matches) > limit)

    async def delete(self, tenant: str, file_id: str) -> None:
        """Delete a file's record and its content. If deleting the content fails, the sweeper does it later. Raises
        ApiError: FILE_NOT_FOUND; FILE_IN_USE while it is pinned."""
        try:
            record = await self.registry.remove(tenant, checked_id(file_id))
        except ApiError as error:
            if not refuses_writes(error):
                raise
            record = await self._delete_content_first(tenant, file_id)
        await self.storage.discard([record.object_name])

    async def _delete_content_first(self, tenant: str, file_id: str) -> FileRecord:
        """Delete a file while Redis refuses writes: first its content, so that a full disk has room again, and then its
        record, as soon as Redis accepts that. Return the record. Raises ApiError: what `delete` raises, or
        REGISTRY_UNAVAILABLE if Redis still refuses after RECOVERY_SECONDS. The record is then left for another try."""
        record = await self.registry.find_removable(tenant, file_id)
        await self.storage.discard([record.object_name])
        for _ in range(RECOVERY_TRIES - 1):
            await asyncio.sleep(RECOVERY_SECONDS / RECOVERY_TRIES)
            try:
                return await self.registry.remove(tenant, file_id)
            except ApiError as error:
                if not refuses_writes(error):
                    raise
        return await self.registry.remove(tenant, file_id)

    def content(self, record: FileRecord, start: int = 0, length: int | None = None) -> AsyncGenerator[bytes, None]:
        """Yield up to `length` bytes (None: all) of a file's content from offset `start`, in pieces of up to 256
        KiB."""
        return self.storage.read(record.object_name, start, length)

    async def download(
        self, record: FileRecord, start: int = 0, length: int | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Yield what `content` yields, for a client, which may read slowly: the file is open until it is read. Raises
        ApiError (RATE_LIMIT_EXCEEDED): the tenant downloads MOST_DOWNLOADS files already."""
        with self._downloads.taken(record.tenant):
            async with aclosing(self.content(record, start, length)) as pieces:
                async for piece in pieces:
                    yield piece

    def url(self, record: FileRecord) -> str:
        """Return the URL of a file's content for another process that reads it with fsspec."""
        return self.storage.url(record.object_name)

    async def pin(self, tenant: str, file_id: str, holder: str, *, seconds: float = PIN_SECONDS) -> FileRecord:
        """Protect a file from deletion and expiry until `holder` (e.g. a batch's id) unpins it, at most for `seconds`.
        Return the file's record. Raises ApiError: FILE_NOT_FOUND."""
        return await self.registry.pin(tenant, checked_id(file_id), holder, seconds)

    async def unpin(self, tenant: str, file_id: str, holder: str) -> None:
        """Remove a holder's pin from a tenant's file. Does nothing if there is none. Raises ApiError: FILE_NOT_FOUND
        only if the id is malformed."""
        await self.registry.unpin(tenant, checked_id(file_id), holder)

    async def charge_answers(self, tenant: str, batch_id: str, num_bytes: int) -> None:
        """Charge a tenant for `num_bytes` more of a batch's answers, or less if negative, which are in storage but in
        no file yet, beyond any quota."""
        await self.registry.charge_answers(tenant, batch_id, num_bytes, PIN_SECONDS)

    async def refund_answers(self, tenant: str, batch_id: str) -> None:
        """Refund what a batch's answers were charged, because they have been deleted; its result files are charged by
        themselves."""
        await self.registry.refund_answers(tenant, batch_id)

    async def check_quota(self, tenant: str) -> None:
        """Raise ApiError (INSUFFICIENT_QUOTA) if a tenant's files and results have as many bytes as they may have."""
        if (await self.use(tenant)).bytes >= self.limits.tenant_bytes:
            raise too_many_bytes(self.limits.quota)

    async def use(self, tenant: str) -> FileUse:
        """Return the bytes and number of files that a tenant is charged for, uploads under way included."""
        return await self.registry.use(tenant)


async def keep_upload(upload: Upload, filename: str, purpose: str, expires_after: int | None = None) -> FileRecord:
    """Make a file of a caller's upload, named `filename`, and return its record. `purpose` must be BATCH. The file
    expires `expires_after` seconds after the upload began (None: MAX_EXPIRY). Raises ApiError: INVALID_REQUEST for an
    invalid argument or an empty upload; REGISTRY_UNAVAILABLE like `Upload.keep`."""
    check_purpose(purpose)
    if not upload.bytes:
        raise invalid_request("the file is empty", "file")
    if len(filename) > MAX_FILENAME:
        raise invalid_request(f"filename must be at most {MAX_FILENAME} characters", "file")
    if expires_after is not None and not MIN_EXPIRY <= expires_after <= MAX_EXPIRY:
        raise invalid_request(f"seconds must be from {MIN_EXPIRY} to {MAX_EXPIRY}", "expires_after[seconds]")
    return await upload.keep(filename, purpose, MAX_EXPIRY if expires_after is None else expires_after)


def check_purpose(purpose: str) -> None:
    """Raise ApiError (INVALID_REQUEST) if the purpose of a caller's file is not BATCH."""
    if purpose != BATCH:
        raise invalid_request(f"purpose must be {BATCH!r}: files here are input of batches", "purpose")
