"""The space on a disk that what tenants do leaves free, so that the store of the gateway can always write.

The embedded store answers every write, also a deletion, with an error while it cannot append to its file. A disk that
tenants' files have filled therefore cannot be emptied through the gateway.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Protocol

from gateway.core.errors import ApiError, Fault

RESERVE_BYTES = 256 * 2**20
RESERVE_PARTS = 50
MOST_RESERVE_BYTES = 8 * 2**30
"""The reserve is RESERVE_BYTES or the disk's size divided by RESERVE_PARTS (2 %), whichever is more, but at most
MOST_RESERVE_BYTES. 256 MiB are some hundred thousand requests in the store's file, and a disk that is almost full takes
long to write."""
SMALL_PARTS = 4
"""The reserve is at most the disk's size divided by SMALL_PARTS, so that a small disk has room for files, too."""
STORE = "valkey/appendonlydir"
"""Folder of the embedded store's files, in the data directory."""
STORE_SECONDS = 1.0
"""Seconds between two measurements of the store's size."""


class DiskUsage(Protocol):
    """Size and free space of a file system in bytes, as `shutil.disk_usage` returns them."""

    @property
    def total(self) -> int: ...

    @property
    def free(self) -> int: ...


class SpaceUse(IntEnum):
    """What a tenant's bytes are for. The value is the number of reserves that a write leaves free: uploads end before
    the answers of batches that run, so that one tenant's uploads do not stop another tenant's batches."""

    RESULT = 1
    """Answers and indexes of batches, and stored responses."""
    UPLOAD = 2
    """Files of tenants, and new batches."""


class Disk:
    """The file system of a folder. Methods block for some microseconds on a local disk."""

    def __init__(
        self,
        folder: Path,
        store: Path | None = None,
        measure: Callable[[Path], DiskUsage] = shutil.disk_usage,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`store` is the folder of the embedded store's file, which counts if it is on the same file system. None means
        that there is no embedded store."""
        self.folder = folder
        self._store = store
        self._measure = measure
        self._clock = clock
        self._store_bytes, self._store_measured = 0, -STORE_SECONDS

    @classmethod
    def of_store(cls, data_dir: Path) -> Disk:
        """Return the disk of the embedded store in a data directory."""
        return cls(data_dir, data_dir / STORE)

    @property
    def free(self) -> int:
        """Bytes that this process may still write. Raises OSError."""
        return self._measure(self.folder).free

    @property
    def total(self) -> int:
        """Size of the file system in bytes. Raises OSError."""
        return self._measure(self.folder).total

    @property
    def reserve(self) -> int:
        """Bytes of one reserve. Raises OSError."""
        return reserve_bytes(self.total, self._size_of_store())

    def has_room(self, use: SpaceUse, num_bytes: int = 0) -> bool:
        """Return whether `num_bytes` can be written for `use` now. A disk that cannot be measured, or says that it has
        no size, as some network file systems do, has room: writing to it then says what is wrong."""
        try:
            return self.free - num_bytes >= use * self.reserve or not self.total
        except OSError:
            return True

    def check(self, use: SpaceUse, num_bytes: int = 0) -> None:
        """Raise ApiError (INSUFFICIENT_STORAGE) if `num_bytes` cannot be written for `use` now."""
        if not self.has_room(use, num_bytes):
            raise disk_full()

    def _size_of_store(self) -> int:
        """Return the bytes of the store's files, which it writes anew from time to time and needs twice meanwhile; 0 if
        there are none on this file system."""
        now = self._clock()
        if self._store is not None and now - self._store_measured >= STORE_SECONDS:
            self._store_measured = now
            self._store_bytes = _bytes_in(self._store, self.folder)
        return self._store_bytes


def reserve_bytes(total: int, store_bytes: int = 0) -> int:
    """Return the bytes of a disk of `total` bytes that must stay free, beside a store whose files have
    `store_bytes`."""
    share = min(max(RESERVE_BYTES, total // RESERVE_PARTS), MOST_RESERVE_BYTES)
    return min(share, total // SMALL_PARTS) + store_bytes


def disk_full() -> ApiError:
    """Return the error for something that a tenant wants to store when the disk is almost full."""
    message = "the disk of the gateway is almost full, so nothing more can be stored; delete files or try again later"
    return ApiError(Fault.INSUFFICIENT_STORAGE, message)


def _bytes_in(store: Path, folder: Path) -> int:
    try:
        if store.stat().st_dev != folder.stat().st_dev:
            return 0
        return sum(file.stat().st_size for file in store.iterdir() if file.is_file())
    except OSError:  # there is no store yet, or it replaces a file just now
        return 0
