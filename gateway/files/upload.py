"""Uploads of files. Bytes are charged before they are written, and refunded unless a file is made of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress

import structlog

from gateway.core.errors import ApiError, request_too_large
from gateway.core.space import SpaceUse
from gateway.files.record import FileRecord, object_of
from gateway.files.registry import FileRegistry, Reservation, lease_expired
from gateway.files.storage import Storage

log = structlog.get_logger("files")

PIECE_BYTES = 2**20
"""Number of bytes that are charged and written at a time."""
RENEWALS = 3
"""Number of renewals within the term of an upload's lease, so that two of them may fail."""


class Upload:
    """One upload: content that is written and charged, but belongs to no file until `keep`. `bytes` is its size so
    far."""

    def __init__(
        self,
        storage: Storage,
        registry: FileRegistry,
        reservation: Reservation,
        use: SpaceUse = SpaceUse.UPLOAD,
    ) -> None:
        self._storage, self._registry, self._reservation = storage, registry, reservation
        self._use = use
        self._object = object_of(reservation.tenant, reservation.token)
        self._renewing: asyncio.Task[None] | None = None
        self._may_be_kept = False
        self._began_ms = 0
        self._charged_bytes = 0
        self.bytes = 0

    async def receive(self, chunks: AsyncIterator[bytes], expected: int, most: int | None) -> None:
        """Reserve `expected` bytes, then charge and write the content until it ends. The lease is renewed in the
        background until `close`. `most` is the maximum number of bytes; None means any number.

        Raises ApiError: REQUEST_TOO_LARGE, INSUFFICIENT_QUOTA, INSUFFICIENT_STORAGE, STORAGE_UNAVAILABLE,
        REGISTRY_UNAVAILABLE.
        """
        self._charged_bytes = expected
        self._began_ms = await self._registry.reserve(self._reservation, expected)
        self._renewing = asyncio.create_task(self._renew(), name="upload-lease")
        await self._storage.write(self._object, self._charged(chunks, most), self._use, expected)

    async def keep(self, filename: str, purpose: str, expires_after: int | None) -> FileRecord:
        """Make a file of the content and return its record, or that of the file with its id. It expires `expires_after`
        seconds after the upload began, or never. Raises ApiError (REGISTRY_UNAVAILABLE), also if the lease ran out."""
        reserved = self._reservation
        created = self._began_ms // 1000
        ends = None if expires_after is None else created + expires_after
        record = FileRecord(
            reserved.file_id, reserved.tenant, self.bytes, created, filename, purpose, ends, reserved.token
        )
        self._may_be_kept = True  # until Redis says that it was not kept
        kept = await asyncio.shield(self._registry.keep(record, self._began_ms))
        self._may_be_kept = kept is not None and kept.token == reserved.token
        if kept is None:
            raise lease_expired()
        return kept

    async def close(self) -> None:
        """Stop renewing the lease and, unless the upload was kept, delete its object and refund its charge. If a
        failure of Redis left unknown whether it was kept, leave both to the sweeper. Failures are only logged."""
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
        """Renew the upload's lease periodically, forever, because bytes may be slow to come."""
        while True:
            await asyncio.sleep(self._registry.lease_seconds / RENEWALS)
            with suppress(ApiError):  # if the lease runs out, the next `hold` or `keep` raises
                await self._registry.hold(self._reservation, self._charged_bytes)


@asynccontextmanager
async def uploading(
    upload: Upload, chunks: AsyncIterator[bytes], expected: int = 0, most: int | None = None
) -> AsyncGenerator[Upload, None]:
    """Receive `chunks` into `upload`, with `expected` and `most` as in `Upload.receive`, and yield it. In the body,
    `Upload.keep` may be called. On exit, also after an error, the upload is closed."""
    try:
        await upload.receive(chunks, expected, most)
        yield upload
    finally:
        await upload.close()


async def _pieces(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield the bytes of `chunks` in pieces of at least PIECE_BYTES (but the last), to make fewer calls and thread
    switches."""
    piece = bytearray()
    async for chunk in chunks:
        piece += chunk
        if len(piece) >= PIECE_BYTES:
            yield bytes(piece)
            piece.clear()
    if piece:
        yield bytes(piece)
