"""Storage of objects that are written once and read in pieces. All blocking calls run in threads."""

from __future__ import annotations

import asyncio
import errno
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, TypeVar

import structlog

from gateway.config.file import ConfigError
from gateway.core.errors import ApiError, Fault, unavailable
from gateway.core.space import STORE, Disk, SpaceUse, disk_full
from gateway.files.places import Folder, StorageBackend, folder_url, storage_backend

log = structlog.get_logger("files")

READ_BYTES = 256 * 2**10
PARTIAL = "partial/"
"""Prefix of the names of objects that are still being written."""
THREADS = 8
INSTALL = "pip install 'loralane[remote]'"
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of an operating system that has no room for what was written."""

T = TypeVar("T")


class Storage:
    """Stores immutable objects under names that the gateway makes. An object exists completely or not at all, and is
    durable once it exists. Methods raise ApiError (STORAGE_UNAVAILABLE) if the storage is away or broken, and log the
    cause."""

    def __init__(self, place: StorageBackend, disk: Disk | None = None) -> None:
        """`disk` is where `place` is, and is never written full. None means that its space is another's concern."""
        self._place = place
        self._disk = disk
        self._threads = ThreadPoolExecutor(THREADS, "storage")

    def close(self) -> None:
        """Cancel operations that have not started, and accept no new ones. Running ones continue."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def url(self, name: str) -> str:
        """Return the URL of an object for another process that opens it with fsspec."""
        return f"{self._place.url}/{name}"

    def has_room(self, use: SpaceUse) -> bool:
        """Return whether the disk has room for more bytes that are for `use`."""
        return self._disk is None or self._disk.has_room(use)

    async def write(
        self, name: str, chunks: AsyncIterator[bytes], use: SpaceUse = SpaceUse.UPLOAD, expected: int = 0
    ) -> int:
        """Write an object of at least `expected` bytes and return its size. An exception leaves nothing under `name`; a
        cancellation during the final rename may leave the whole. Raises ApiError: INSUFFICIENT_STORAGE."""
        partial, written = f"{PARTIAL}{uuid.uuid4().hex}", 0
        try:
            await self._run(self._check_room, use, expected)
            file = await self._opened(self._place.create, partial)
            try:
                async for chunk in chunks:
                    await self._run(self._append, file, chunk, use)
                    written += len(chunk)
            finally:
                await self._run(file.close)
            await self._run(self._place.publish, partial, name)
        except BaseException:
            await self.discard([partial])
            raise
        return written

    async def read(self, name: str, start: int = 0, length: int | None = None) -> AsyncGenerator[bytes, None]:
        """Yield up to `length` bytes (None: all) of an object from the offset `start`, in pieces of at most 256 KiB.
        Raises ApiError (STORAGE_UNAVAILABLE), also if the object does not exist."""
        file = await self._opened(self._place.open, name)
        try:
            await self._run(file.seek, start)
            left = length
            while left is None or left > 0:
                piece = await self._run(file.read, READ_BYTES if left is None else min(left, READ_BYTES))
                if not piece:
                    return
                left = None if left is None else left - len(piece)
                yield piece
        finally:
            await self._run(file.close)

    async def size(self, name: str) -> int | None:
        """Return the size of an object in bytes. None means that it does not exist."""
        return await self._run(self._place.size, name)

    async def total_size(self, names: Sequence[str]) -> int:
        """Return the size of several objects together, in bytes."""
        return await self._run(lambda: sum(self._place.size(name) or 0 for name in names))

    async def delete(self, names: Sequence[str]) -> None:
        """Delete the objects with these names. Names that do not exist are ignored."""
        await self._run(self._delete, names)

    async def discard(self, names: Sequence[str]) -> None:
        """Delete objects that are no longer needed. A failure is only logged: the sweeper deletes them later."""
        try:
            await self.delete(names)
        except ApiError:
            log.warning("objects_left", names=names)

    async def list(self, prefix: str) -> list[str]:
        """Return the names of all objects that begin with `prefix`, which ends with a slash."""
        return await self._run(self._place.list, prefix)

    def _check_room(self, use: SpaceUse, num_bytes: int) -> None:
        if self._disk is not None:
            self._disk.check(use, num_bytes)

    def _append(self, file: BinaryIO, chunk: bytes, use: SpaceUse) -> None:
        self._check_room(use, len(chunk))
        file.write(chunk)

    def _delete(self, names: Sequence[str]) -> None:
        for name in names:
            self._place.delete(name)

    async def _opened(self, opener: Callable[[str], BinaryIO], name: str) -> BinaryIO:
        """Return the file that `opener(name)` opens in a thread. If the caller is cancelled meanwhile, the file is
        closed."""
        opened: list[BinaryIO] = []
        try:
            await self._run(lambda: opened.append(opener(name)))
        except asyncio.CancelledError:
            for file in opened:
                await self._run(file.close)
            raise
        return opened[0]

    async def _run(self, work: Callable[..., T], *args: object) -> T:
        """Run `work` in a thread to its end, even if cancelled, because it writes to a file, and return its result.
        Raises its ApiError, or for other exceptions, logged, INSUFFICIENT_STORAGE or STORAGE_UNAVAILABLE."""
        job = asyncio.get_running_loop().run_in_executor(self._threads, work, *args)
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            await asyncio.wait([job])
            if not job.cancelled():
                job.exception()  # retrieved, so that asyncio does not log it as never retrieved
            raise
        except ApiError:
            raise
        except Exception as error:  # storage libraries raise what they like
            log.error("storage_failed", error=f"{type(error).__name__}: {error}")
            if isinstance(error, OSError) and error.errno in FULL:
                raise disk_full() from error
            raise unavailable(Fault.STORAGE_UNAVAILABLE, "the storage of files is not available") from error


def open_storage(url: str, data_dir: Path) -> Storage:
    """Open the storage at an fsspec URL. An empty URL means the folder `files` in `data_dir`. Raises ConfigError if the
    URL is invalid, needs a package that is not installed, or the folder cannot be created."""
    try:
        place = storage_backend(url or folder_url((data_dir / "files").resolve()))
        return Storage(place, Disk(place.root, data_dir / STORE) if isinstance(place, Folder) else None)
    except ImportError as error:
        raise ConfigError(f"batches.storage: {error}; {INSTALL}") from error
    except (ValueError, OSError) as error:
        raise ConfigError(f"batches.storage: {error}") from error
