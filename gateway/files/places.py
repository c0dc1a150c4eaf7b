"""Where objects lie: a folder of this machine, or an object store behind fsspec. Blocking: runs in threads.

Names are paths of ours with slashes, never a caller's words. An object appears under its name when it is whole.
"""

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
"""Of an object store: held in memory for each object that is being written or read."""

T = TypeVar("T")


class Place(Protocol):
    """Every method raises whatever its storage does, OSError among it."""

    @property
    def url(self) -> str:
        """For fsspec, in another process."""

    def create(self, name: str) -> BinaryIO:
        """A new object, to be written."""

    def publish(self, partial: str, name: str) -> None:
        """Gives a whole and closed object its own name, for good: it is there after a loss of power."""

    def open(self, name: str) -> BinaryIO: ...

    def size(self, name: str) -> int | None:
        """In bytes; None: there is no such object."""

    def delete(self, name: str) -> None:
        """One that is missing is fine."""

    def list(self, prefix: str) -> list[str]:
        """Names that begin with a folder's, which ends with a slash."""


class Folder:
    """Of this machine, or mounted by it."""

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()
        self._root.mkdir(parents=True, exist_ok=True, mode=0o700)

    @property
    def url(self) -> str:
        return url_of(self._root)

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
        """And folders that are empty then."""
        path = self._root / name
        path.unlink(missing_ok=True)
        with suppress(OSError):
            for folder in self._above(path):
                folder.rmdir()

    def list(self, prefix: str) -> list[str]:
        found = (Path(folder) / name for folder, _, names in os.walk(self._root / prefix) for name in names)
        return [path.relative_to(self._root).as_posix() for path in found]

    def _within(self, folder: Path, work: Callable[[], T]) -> T:
        """Does what needs a folder, which somebody else may find empty, and remove, at any moment."""
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
        """Folders below the root, from the innermost."""
        return (folder for folder in path.parents if folder != self._root and folder.is_relative_to(self._root))


class ObjectStore:
    """S3, Google Cloud Storage and their like: what has no folders, and where moving is copying at the server."""

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


def url_of(folder: Path) -> str:
    """As fsspec reads it: nothing is quoted, whatever a path is made of."""
    return f"file://{folder}"


def place_of(url: str) -> Place:
    """Raises ImportError, ValueError: nothing installed knows such URLs."""
    # What another gateway wrote must show: no listing that was made before is good.
    system, path = fsspec.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False)
    if isinstance(system, LocalFileSystem):
        return Folder(Path(path))
    return ObjectStore(system, path, url)


def _sync(path: Path) -> None:
    """What was written there, or in that folder, survives a loss of power from here on."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
