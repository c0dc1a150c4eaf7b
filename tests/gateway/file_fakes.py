"""Storages and uploads for tests of files."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import BinaryIO

import pytest
from redis.asyncio import Redis

from gateway.core.errors import ApiError
from gateway.core.space import Disk
from gateway.files.places import Folder, folder_url, storage_backend
from gateway.files.record import new_file_id
from gateway.files.registry import FileRegistry, FileUse
from gateway.files.service import FileLimits, Files
from gateway.files.storage import Storage

MIB = 2**20
LIMITS = FileLimits(max_file_bytes=4 * MIB, tenant_bytes=10 * MIB, tenant_files=5)


class FullFolder(Folder):
    """A disk with room for so many bytes more."""

    room: int = 0

    def create(self, name: str) -> BinaryIO:
        return FullFile(super().create(name), self)


class FullFile:
    def __init__(self, file: BinaryIO, disk: FullFolder) -> None:
        self._file, self._disk = file, disk

    def write(self, data: bytes) -> int:
        if len(data) > self._disk.room:
            raise OSError(errno.ENOSPC, "no space left on device")
        self._disk.room -= len(data)
        return self._file.write(data)

    def close(self) -> None:
        self._file.close()


def build_files(
    redis: Redis, where: str | Path | Folder, limits: FileLimits = LIMITS, disk: Disk | None = None, **options
) -> Files:
    """Return the file service over `where`: a URL, the path of a folder, or an opened folder."""
    place = (
        where if isinstance(where, Folder) else storage_backend(where if isinstance(where, str) else folder_url(where))
    )
    return Files(Storage(place, disk), FileRegistry(redis, **options), limits)


async def pieces(*data: bytes) -> AsyncIterator[bytes]:
    for piece in data:
        yield piece


async def filler(num_bytes: int) -> AsyncIterator[bytes]:
    """Bytes of no meaning, in pieces of an odd size."""
    for start in range(0, num_bytes, 99_991):
        yield b"x" * min(99_991, num_bytes - start)


async def stuck(first: bytes, reached: asyncio.Event) -> AsyncIterator[bytes]:
    """Sends something, and then never again."""
    yield first
    reached.set()
    await asyncio.Event().wait()


async def whole(content: AsyncIterator[bytes]) -> bytes:
    return b"".join([piece async for piece in content])


def objects(folder: Path) -> list[str]:
    """All that lies in a storage's folder."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def walk(files: Files) -> None:
    """Every operation once, on whatever server the records are in."""
    records = [await files.create("acme", "a", "batch", filler(MIB), 7200) for _ in range(3)]
    output = await files.adopt("acme", new_file_id(), "b", filler(10))
    assert [record.id for record in (await files.list("acme", purpose="batch")).data] == [r.id for r in records[::-1]]
    assert await files.pin("acme", records[0].id, "batch_1") == records[0]
    with pytest.raises(ApiError):
        await files.delete("acme", records[0].id)
    await files.unpin("acme", records[0].id, "batch_1")
    await files.delete("acme", records[0].id)
    assert await files.use("acme") == FileUse(2 * MIB + 10, 3)
    gone, known = await files.registry.sweep("acme", [records[0].token, records[1].token, output.token])
    assert (gone, known) == ([], {records[1].token, output.token})
