"""Places where objects are stored: a local folder, or an object store behind fsspec. All calls block and run in
threads. Names are the gateway's; an object appears only when complete."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

TRIES = 5
BLOCK_BYTES = 8 * 2**20
"""Block size in bytes for object stores. One block is held in memory for each object that is being written or read."""

T = TypeVar("T")


class StorageBackend(Protocol):
    """A place that stores objects by name, such as a folder. All methods block and raise the exceptions of the
    storage's library, including OSError. `open` opens an object for reading."""

    @property
    def url(self) -> str:
        """URL with which another process opens the place through fsspec. `/NAME` is appended for an object."""

    def create(self, name: str) -> BinaryIO:
        """Create an object under a name that is not in use, with its folders, and open it for writing."""

    def publish(self, partial: str, name: str) -> None:
        """Rename a complete and closed object to its final name. On return the object survives a loss of power."""

    def open(self, name: str) -> BinaryIO: ...

    def size(self, name: str) -> int | None:
        """Return the size of an object in bytes. None means that it does not exist."""

    def delete(self, name: str) -> None:
        """Delete an object. Does nothing if it does not exist."""

    def list(self, prefix: str) -> list[str]:
        """Return the names of all objects below the folder `prefix`, which ends with a slash."""


class Folder:
    """`StorageBackend` in a local or mounted folder, which is created if it does not exist."""

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()
        self._root.mkdir(parents=True, exist_ok=True, mode=0o700)

    @property
    def root(self) -> Path:
        """The folder itself, an absolute path."""
        return self._root

    @property
    def url(self) -> str:
        return folder_url(self._root)

    def create(self, name: str) -> BinaryIO:
        path = self._root / name
        return self._within(path.parent, lambda: path.open("xb"))

    def publish(self, partial: str, name: str) -> None:
        source, target = self._root / partial, self._root / name
        _sync(source)
        self._within(target.parent, lambda: source.replace(target))
        _sync(target.parent)

    def open(self, name: str) -> BinaryIO:
        return (self._root / name).open("rb")

    def size(self, name: str) -> int | None:
        try:
            return (self._root / name).stat().st_size
        except FileNotFoundError:
            return None

    def delete(self, name: str) -> None:
        """Delete an object and the folders that become empty."""
        path = self._root / name
        path.unlink(missing_ok=True)
        with suppress(OSError):
            for folder in self._above(path):
                folder.rmdir()

    def list(self, prefix: str) -> list[str]:
        paths = (Path(folder) / name for folder, _, names in os.walk(self._root / prefix) for name in names)
        return [path.relative_to(self._root).as_posix() for path in paths]

    def _within(self, folder: Path, work: Callable[[], T]) -> T:
        """Create `folder` and return the result of `work`; try again (TRIES in all) if another process removes the
        empty folder."""
        for _ in range(TRIES - 1):
            with suppress(FileNotFoundError):
                self._make(folder)
                return work()
        self._make(folder)
        return work()

    def _make(self, folder: Path) -> None:
        if not folder.is_dir():
            self._make(folder.parent)
            folder.mkdir(exist_ok=True)
            _sync(folder.parent)

    def _above(self, path: Path) -> Iterator[Path]:
        """Yield the folders between the path and the root (both exclusive), the innermost first."""
        return (folder for folder in path.parents if folder != self._root and folder.is_relative_to(self._root))


class ObjectStore:
    """`StorageBackend` in an object store such as S3 or Google Cloud Storage, through the fsspec filesystem `system`.
    It has no folders; `publish` copies the object within the store."""

    def __init__(self, system: Any, root: str, url: str) -> None:
        self._system, self._root, self._url = system, root.rstrip("/"), url.rstrip("/")

    @property
    def url(self) -> str:
        return self._url

    def create(self, name: str) -> BinaryIO:
        return self._system.open(self._path(name), "wb", block_size=BLOCK_BYTES)

    def publish(self, partial: str, name: str) -> None:
        self._system.mv(self._path(partial), self._path(name))

    def open(self, name: str) -> BinaryIO:
        return self._system.open(self._path(name), "rb", block_size=BLOCK_BYTES)

    def size(self, name: str) -> int | None:
        try:
            return int(self._system.size(self._path(name)))
        except FileNotFoundError:
            return None

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._system.rm_file(self._path(name))

    def list(self, prefix: str) -> list[str]:
        return [path.removeprefix(self._path("")) for path in self._system.find(self._path(prefix))]

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def folder_url(folder: Path) -> str:
    """Return a folder's URL for fsspec, which expects no quoting of special characters."""
    return f"file://{folder}"


def storage_backend(url: str) -> StorageBackend:
    """Return a `Folder` for an fsspec URL of a local folder, else an `ObjectStore`. Raises ImportError or ValueError if
    no installed package supports the URL, OSError if the folder cannot be created."""
    # Cached listings must not be used, because they may lack what other gateways wrote.
    system, path = fsspec.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False)
    if isinstance(system, LocalFileSystem):
        return Folder(Path(path))
    return ObjectStore(system, path, url)


def _sync(path: Path) -> None:
    """Block until what was written to a file, or the entries of a folder, is on the disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
