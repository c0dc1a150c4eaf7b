"""Records of files and the charges of tenants, in Redis. One script has all operations (books.lua); each call runs one
of them. Keys of one tenant share the hash tag {tenant}; `*` is the configured prefix

    *file-records:{tenant}  hash  id -> record as JSON
    *file-order:{tenant}    zset  id, scored by the time when its upload began; also of the last files that ended
    *file-expiry:{tenant}   zset  id, scored by its expiry, of files that expire
    *file-use:{tenant}      hash  bytes and files charged: those of files, and those of uploads
    *file-held:{tenant}     hash  token of an upload, or id of a batch that has answers -> bytes it is charged for
    *file-leases:{tenant}   zset  token, scored by the time when its charge is refunded unless it is renewed
    *file-pins:{tenant}     hash  id -> holders that need the file, each until when
    *file-gone:{tenant}     zset  id, scored by the time when its file was deleted or expired, of the last 1,000
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from gateway.core.errors import ApiError, Fault, file_not_found, unavailable
from gateway.files.record import FileRecord, decode, encode
from gateway.redis.client import Argument, RedisCalls, Script, StoreError

CALL_SECONDS = 2.0
LEASE_SECONDS = 60.0
"""Seconds after its last renewal when an upload is refunded, because its gateway may have died."""
KINDS = ("records", "order", "expiry", "use", "held", "leases", "pins", "gone")
AT_ONCE = 500
"""Maximum number of records in one call, because Redis runs nothing else during a script."""
FULL, CROWDED, LOST = 0, -1, -1
ABSENT, PINNED = 0, -1
"""Results of the script `remove` when nothing was removed: no such file; a batch has pinned the file."""


@dataclass(frozen=True, slots=True)
class FileQuota:
    """Maximum total bytes and number of files, uploads under way included, that one tenant may be charged for."""

    bytes: int
    files: int


UNBOUNDED = FileQuota(2**53, 2**53)


@dataclass(frozen=True, slots=True)
class FileUse:
    """Bytes and number of files that one tenant is charged for now, uploads under way included."""

    bytes: int
    files: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """An upload under way: its tenant, the id of the future file, the upload's unique token and the tenant's quota."""

    tenant: str
    file_id: str
    token: str
    quota: FileQuota


class FileRegistry:
    """Records of files, and the tenants' charges for files and uploads, in Redis. Every method raises ApiError
    (REGISTRY_UNAVAILABLE) while Redis is away."""

    def __init__(self, client: Redis, *, prefix: str = "loralane:", lease_seconds: float = LEASE_SECONDS) -> None:
        self._calls = RedisCalls.without_breaker(client, prefix, CALL_SECONDS)
        self._script = Script.load("books.lua", package="gateway.files")
        self._lease_ms = int(lease_seconds * 1000)
        self.lease_seconds = lease_seconds

    async def reserve(self, upload: Reservation, num_bytes: int = 0) -> int:
        """Begin an upload: charge its tenant for one file and its first `num_bytes`, under a lease of `lease_seconds`.
        Return the time of beginning in Unix milliseconds on Redis's clock. Raises ApiError: INSUFFICIENT_QUOTA."""
        bounds = (self._lease_ms, upload.quota.bytes, upload.quota.files)
        outcome, began_ms = await self._do("reserve", upload.tenant, upload.token, num_bytes, *bounds)
        if outcome == FULL:
            raise too_many_bytes(upload.quota)
        if outcome == CROWDED:
            raise _no_room(f"there may be {upload.quota.files} at once")
        return int(began_ms)

    async def hold(self, upload: Reservation, num_bytes: int) -> None:
        """Set an upload's charge to `num_bytes` in total and renew its lease. Call this before the bytes are written.
        Raises ApiError: INSUFFICIENT_QUOTA; REGISTRY_UNAVAILABLE, also if the lease ran out."""
        most = upload.quota.bytes
        outcome = await self._do("hold", upload.tenant, upload.token, num_bytes, self._lease_ms, most)
        if outcome == FULL:
            raise too_many_bytes(upload.quota)
        if outcome == LOST:
            raise lease_expired()

    async def drop(self, upload: Reservation) -> None:
        """End an upload and refund its charge. Does nothing if the upload has ended."""
        await self._do("drop", upload.tenant, upload.token)

    async def charge_answers(self, tenant: str, batch_id: str, num_bytes: int, seconds: float) -> None:
        """Charge a tenant for `num_bytes` more of a batch's answers, or less if negative, beyond any quota, until
        `refund_answers` is called or nothing was added for `seconds`. Repeating the call after an error may charge
        twice until then."""
        await self._do("grow", tenant, batch_id, num_bytes, int(seconds * 1000))

    async def refund_answers(self, tenant: str, batch_id: str) -> None:
        """Refund all charges of `charge_answers` for a batch. Does nothing if there are none."""
        await self._do("drop", tenant, batch_id)

    async def keep(self, record: FileRecord, began_ms: int) -> FileRecord | None:
        """Make a file of the upload with the record's token, and return its record, or that of the file that has the id
        already. `began_ms` is from `reserve`. None means that the lease ran out."""
        ends = "" if record.expires_at is None else record.expires_at * 1000
        kept = await self._do("keep", record.tenant, record.token, record.id, encode(record), began_ms, ends)
        return None if kept is None else decode(kept)

    async def find(self, tenant: str, file_id: str) -> FileRecord:
        """Return the record of a file that exists and has not expired. Raises ApiError: FILE_NOT_FOUND."""
        reply = await self._do("read", tenant, file_id)
        if not reply:
            raise file_not_found(file_id)
        return decode(reply[0])

    async def ids(self, tenant: str, after: str, newest_first: bool) -> list[str] | None:
        """Return the ids of a tenant's files, perhaps ended ones, after the file `after` (all if empty), sorted by
        their uploads. None means that `after` is unknown, also among the last 1,000 that ended."""
        reply = await self._do("ids", tenant, after, int(newest_first))
        return None if reply is None else [item.decode() for item in reply]

    async def read(self, tenant: str, ids: Sequence[str]) -> list[FileRecord]:
        """Return the records of those of the files `ids` (at most AT_ONCE) that exist and have not expired, in that
        order."""
        return [decode(text) for text in await self._do("read", tenant, *ids)]

    async def remove(self, tenant: str, file_id: str) -> FileRecord:
        """Remove the record of a file, refund its charge, and return the record. The object is not deleted. Raises
        ApiError: FILE_NOT_FOUND; FILE_IN_USE if the file is pinned."""
        return _removed(await self._do("remove", tenant, file_id), file_id)

    async def find_removable(self, tenant: str, file_id: str) -> FileRecord:
        """Return the record of a file that `remove` would remove now, also while Redis refuses all writes. Raises
        ApiError as `remove` does."""
        return _removed(await self._do("removable", tenant, file_id), file_id)

    async def pin(self, tenant: str, file_id: str, holder: str, seconds: float) -> FileRecord:
        """Pin a file for `holder`: for `seconds` it neither expires nor can be deleted. A new call replaces the
        holder's earlier pin. Return its record. Raises ApiError: FILE_NOT_FOUND."""
        record = await self._do("pin", tenant, file_id, holder, int(seconds * 1000))
        if record is None:
            raise file_not_found(file_id)
        return decode(record)

    async def unpin(self, tenant: str, file_id: str, holder: str) -> None:
        await self._do("unpin", tenant, file_id, holder)

    async def sweep(self, tenant: str, tokens: Sequence[str]) -> tuple[list[FileRecord], set[str]]:
        """Remove a tenant's expired, unpinned files and refund uploads whose lease ran out. Return the removed records,
        whose objects remain, and those of `tokens` (at most AT_ONCE) that are in use."""
        gone, known = await self._do("sweep", tenant, *tokens)
        return [decode(text) for text in gone], {token.decode() for token in known}

    async def use(self, tenant: str) -> FileUse:
        return FileUse(*await self._do("use", tenant))

    async def _do(self, operation: str, tenant: str, *args: Argument) -> Any:
        keys = [self._calls.key(f"file-{kind}", tenant) for kind in KINDS]
        try:
            return await self._calls.run(self._script, keys, [operation, *args])
        except StoreError as error:
            raise unavailable(Fault.REGISTRY_UNAVAILABLE, "the records of files are not available") from error


def refuses_writes(error: ApiError) -> bool:
    """Return whether a method of `FileRegistry` raised `error` because Redis answers, but does nothing, as if its disk
    is full."""
    return isinstance(error.__cause__, StoreError) and error.__cause__.is_refusal


def _removed(reply: Any, file_id: str) -> FileRecord:
    """Return the record in the result of the scripts `remove` and `removable`, or raise its ApiError."""
    if reply == ABSENT:
        raise file_not_found(file_id)
    if reply == PINNED:
        raise ApiError(Fault.FILE_IN_USE, f"a batch still needs {file_id}; cancel it first", "file_id")
    return decode(reply)


def too_many_bytes(quota: FileQuota) -> ApiError:
    return _no_room(f"they may have {quota.bytes} bytes together")


def _no_room(why: str) -> ApiError:
    return ApiError(Fault.INSUFFICIENT_QUOTA, f"there is no room for this file among the tenant's: {why}; delete some")


def lease_expired() -> ApiError:
    return unavailable(Fault.REGISTRY_UNAVAILABLE, "the upload was given up: its lease ran out; send the file again")
