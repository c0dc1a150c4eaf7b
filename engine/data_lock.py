"""Locks on folders of the data directory. The kernel releases a lock when the process that holds it ends or crashes."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

LOCK = "lock"
"""The file in a folder that is locked while a process uses the folder."""


@contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """Keep other processes from removing a folder while the block runs. Several processes may use a folder at once.

    A folder that cannot be written to is not locked.
    """
    file = _lock_file(folder)
    try:
        if file is not None:
            fcntl.flock(file, fcntl.LOCK_SH)
        yield
    finally:
        if file is not None:
            file.close()


def _lock_file(folder: Path) -> TextIO | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / LOCK).open("a")
    except OSError:
        return None


def take(folder: Path) -> TextIO | None:
    """Lock a folder for this process alone.

    Returns:
        The lock file; the lock is held while it is open. None means that another process uses the folder.
    """
    file = (folder / LOCK).open("r")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file
