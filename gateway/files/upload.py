"""A file on its way: its bytes are charged before they are written, and given back unless a file is made of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress

import structlog

from gateway.core.errors import ApiError, request_too_large
from gateway.files.record import FileRecord, object_of
from gateway.files.registry import FileRegistry, Reservation, ran_out
from gateway.files.storage import Storage

log = structlog.get_logger("files")

PIECE_BYTES = 2**20
"""What is charged and written at once."""
RENEWALS = 3
"""Of a lease in its term: two may fail."""


class Upload:
    """Bytes that are written, charged, and nobody's file yet."""

    def __init__(self, storage: Storage, registry: FileRegistry, reservation: Reservation) -> None:
        self._storage, self._registry, self._reservation = storage, registry, reservation
        self._object = object_of(reservation.tenant, reservation.token)
        self._renewing: asyncio.Task[None] | None = None
        self._may_be_kept = False
        self._began_ms = 0
        self._charged_bytes = 0
        self.bytes = 0

    async def receive(self, chunks: AsyncIterator[bytes], expected: int, most: int | None) -> None:
        """
        Args:
            expected: bytes that are charged before any has come.
            most: bytes that may come; None: any number.

        Raises:
            ApiError: REQUEST_TOO_LARGE, INSUFFICIENT_QUOTA, STORAGE_UNAVAILABLE, REGISTRY_UNAVAILABLE.
        """
        self._charged_bytes = expected
        self._began_ms = await self._registry.reserve(self._reservation, expected)
        self._renewing = asyncio.create_task(self._renew(), name="upload-lease")
        await self._storage.write(self._object, self._charged(chunks, most))

    async def keep(self, filename: str, purpose: str, expires_after: int | None) -> FileRecord:
        """Makes a file of what was received, unless there is one with its id: that one is returned then.

        Args:
            expires_after: seconds from when the upload began; None: it stays.
        """
        reserved = self._reservation
        created = self._began_ms // 1000
        ends = None if expires_after is None else created + expires_after
        record = FileRecord(
            reserved.file_id, reserved.tenant, self.bytes, created, filename, purpose, ends, reserved.token
        )
        self._may_be_kept = True  # from here on, until Redis says that it is not
        kept = await asyncio.shield(self._registry.keep(record, self._began_ms))
        self._may_be_kept = kept is not None and kept.token == reserved.token
        if kept is None:
            raise ran_out()
        return kept

    async def close(self) -> None:
        """Leaves nothing of what was not kept. What cannot be told stays for the sweeper, which asks again."""
        if self._renewing is not None:
            self._renewing.cancel()
        if self._may_be_kept:
            return
        await self._storage.discard([self._object])
        try:
            await self._registry.drop(self._reservation)
        except ApiError:
            log.warning("charge_left", tenant=self._reservation.tenant)  # until its lease runs out

    async def _charged(self, chunks: AsyncIterator[bytes], most: int | None) -> AsyncGenerator[bytes, None]:
        async for piece in _pieces(chunks):
            self.bytes += len(piece)
            if most is not None and self.bytes > most:
                raise request_too_large(most)
            if self.bytes > self._charged_bytes:
                self._charged_bytes = self.bytes
                await self._registry.hold(self._reservation, self.bytes)
            yield piece

    async def _renew(self) -> None:
        """For as long as bytes may be slow to come."""
        while True:
            await asyncio.sleep(self._registry.lease_seconds / RENEWALS)
            with suppress(ApiError):  # whoever charges or keeps it next is told, if it is too late
                await self._registry.hold(self._reservation, self._charged_bytes)


@asynccontextmanager
async def uploading(
    upload: Upload, chunks: AsyncIterator[bytes], expected: int = 0, most: int | None = None
) -> AsyncGenerator[Upload, None]:
    """What came of `chunks`, as `Upload.receive` takes them, to be kept inside."""
    try:
        await upload.receive(chunks, expected, most)
        yield upload
    finally:
        await upload.close()


async def _pieces(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """The same bytes, in pieces worth a call to Redis and a thread."""
    piece = bytearray()
    async for chunk in chunks:
        piece += chunk
        if len(piece) >= PIECE_BYTES:
            yield bytes(piece)
            piece.clear()
    if piece:
        yield bytes(piece)
