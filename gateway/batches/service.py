"""Operations on batches for tenants and administrators, independent of the protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import get_args

from gateway.api_schema.batches import DEFAULT_PAGE, MAX_PAGE
from gateway.api_schema.files import MAX_EXPIRY, MIN_EXPIRY
from gateway.batches.record import (
    BATCH_ID,
    Batch,
    BatchEndpoint,
    NewBatch,
    batch_not_found,
    check_metadata,
    new_batch_id,
    window_seconds,
)
from gateway.batches.store import BatchStore
from gateway.core.errors import MAX_QUOTED, ApiError, Fault, invalid_request
from gateway.core.space import Disk, SpaceUse, disk_full
from gateway.core.tenants import Principal
from gateway.files.record import BATCH
from gateway.files.service import Files

ENDPOINTS: tuple[str, ...] = get_args(BatchEndpoint)
CREATING_SECONDS = 600.0
"""Seconds for which the input is pinned while its batch is created, in case the gateway dies before it unpins it."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A caller's request for a new batch, with unchecked fields."""

    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: Mapping[str, str] | None = None
    output_expires_after: int | None = None
    """Seconds after which the output files expire, once they are written. None means MAX_EXPIRY."""

    def check(self) -> None:
        """Check the fields. Raises ApiError (INVALID_REQUEST) that names the first invalid field."""
        if self.endpoint not in ENDPOINTS:
            message = f"endpoint must be one of {', '.join(ENDPOINTS)}, not {self.endpoint[:MAX_QUOTED]!r}"
            raise invalid_request(message, "endpoint")
        window_seconds(self.completion_window)
        check_metadata(self.metadata)
        if self.output_expires_after is not None and not MIN_EXPIRY <= self.output_expires_after <= MAX_EXPIRY:
            message = f"seconds must be from {MIN_EXPIRY} to {MAX_EXPIRY}"
            raise invalid_request(message, "output_expires_after.seconds")


class Batches:
    """Operations on batches for tenants and administrators. Methods raise ApiError (REGISTRY_UNAVAILABLE) if Redis is
    away.

    Callers see only the batches of their own tenant: others give the same BATCH_NOT_FOUND as batches that do not exist.
    """

    def __init__(self, store: BatchStore, files: Files, max_open: int, disk: Disk | None = None) -> None:
        """`max_open` is the number of batches that one tenant may have at once that have not ended. `disk` is the
        store's. None means that the store is not on this machine."""
        self._store = store
        self._disk = disk
        self._files = files
        self._max_open = max_open

    async def create(self, principal: Principal, request: BatchRequest) -> Batch:
        """Create a batch from an uploaded file, pinned until its end. Lines are charged to the principal's key. Raises
        ApiError, creating nothing: INVALID_REQUEST (a field, or the file's purpose is not BATCH), FILE_NOT_FOUND,
        INSUFFICIENT_QUOTA (open batches, or bytes of files), INSUFFICIENT_STORAGE."""
        request.check()
        tenant = principal.tenant.name
        await self._check_room(tenant)
        new = NewBatch(
            new_batch_id(),
            tenant,
            principal.key_id,
            request.endpoint,
            request.input_file_id,
            request.completion_window,
            request.metadata,
            request.output_expires_after,
        )
        await self._pin(new)
        try:
            batch = await self._store.create(new, self._max_open)
        except ApiError:
            with suppress(ApiError):  # else the pin expires by itself
                await self._files.unpin(tenant, new.input_file_id, new.id)
            raise
        with suppress(ApiError):  # else validation pins it
            await self._files.pin(tenant, new.input_file_id, new.id)
        return batch

    async def get(self, principal: Principal, batch_id: str) -> Batch:
        """Return a batch of the caller's tenant. Raises ApiError: BATCH_NOT_FOUND."""
        return await self._store.get(principal.tenant.name, _checked(batch_id))

    async def list(
        self, principal: Principal, after: str | None = None, limit: int = DEFAULT_PAGE
    ) -> tuple[Sequence[Batch], bool]:
        """Return at most `limit` batches of the caller's tenant that follow the batch `after` (None: from the newest),
        newest first, and whether there are more. Raises ApiError (INVALID_REQUEST) if there is no such `after` or
        `limit` is not from 1 to MAX_PAGE."""
        if not 1 <= limit <= MAX_PAGE:
            raise invalid_request(f"limit must be a number from 1 to {MAX_PAGE}", "limit")
        return await self._store.list(principal.tenant.name, after, limit)

    async def open(self, most: int) -> tuple[float, Sequence[Batch]]:
        """Return Redis's time in Unix seconds and up to `most` batches of all tenants that may have work left, those
        with the earliest deadlines, in no order. They are for estimates; tenants must never see them."""
        return await self._store.open(most)

    async def cancel(self, principal: Principal, batch_id: str) -> Batch:
        """Cancel a batch of the caller's tenant and return it. Lines not answered are dropped and running ones aborted;
        answers that exist are kept. Repeating the call changes nothing. Raises ApiError: BATCH_NOT_FOUND;
        BATCH_CONFLICT if it is finalizing or has ended otherwise."""
        return await self._store.cancel(principal.tenant.name, _checked(batch_id))

    async def of_tenant(self, tenant: str) -> Sequence[Batch]:
        """Return the newest batches of any tenant, at most MAX_PAGE, newest first. For administrators."""
        batches, _ = await self._store.list(tenant, None, MAX_PAGE)
        return batches

    async def newest(self) -> Sequence[Batch]:
        """Return the newest batches of all tenants, at most MAX_PAGE, newest first. For administrators."""
        return await self._store.newest(MAX_PAGE)

    async def cancel_for(self, tenant: str, batch_id: str) -> Batch:
        """Cancel a batch of any tenant and return it, for administrators. Raises ApiError as `cancel` does."""
        return await self._store.cancel(tenant, _checked(batch_id))

    async def _check_room(self, tenant: str) -> None:
        """Raise ApiError if there is no room for the results of another batch: INSUFFICIENT_QUOTA, the tenant's files
        have all their bytes; INSUFFICIENT_STORAGE, the disk of the files or of the store is almost full."""
        if not self._files.storage.has_room(SpaceUse.UPLOAD):
            raise disk_full()
        if self._disk is not None:
            self._disk.check(SpaceUse.UPLOAD)
        await self._files.check_quota(tenant)

    async def _pin(self, new: NewBatch) -> None:
        try:
            source = await self._files.pin(new.tenant, new.input_file_id, new.id, seconds=CREATING_SECONDS)
        except ApiError as error:
            if error.fault is Fault.FILE_NOT_FOUND:
                raise replace(error, param="input_file_id") from error
            raise
        if source.purpose != BATCH:
            await self._files.unpin(new.tenant, new.input_file_id, new.id)
            message = f"the purpose of {source.id} is {source.purpose!r}; a batch's input has {BATCH!r}"
            raise invalid_request(message, "input_file_id")


def _checked(batch_id: str) -> str:
    if not BATCH_ID.fullmatch(batch_id):
        raise batch_not_found(batch_id)
    return batch_id
