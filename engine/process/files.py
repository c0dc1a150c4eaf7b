"""Paths of the data directory, and locks on its folders, which the kernel releases when their holder ends."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

UNLOCKED_S = 60.0
"""Seconds for which a new folder may be without a lock."""


def default_data_dir(env: Mapping[str, str]) -> Path:
    """Return the folder of converted models and the embedded store: $LORALANE_DATA_DIR, or `loralane` in the XDG data
    folder."""
    if env.get("LORALANE_DATA_DIR"):
        return Path(env["LORALANE_DATA_DIR"])
    return Path(env.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "loralane"


def partial_prefix(name: str, pid: int) -> str:
    """Return the name prefix of the temporary folder that process `pid` fills before it becomes the folder `name`."""
    return f".{name}-{pid}-"


def partials(data_dir: Path, pid: int) -> list[Path]:
    """Return the unfinished model folders of process `pid`."""
    return sorted((data_dir / "models").glob(f".*-{pid}-*"))


def remove_partials(data_dir: Path, pid: int) -> None:
    """Remove the unfinished model folders of process `pid`, which has ended."""
    for folder in partials(data_dir, pid):
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def filling(folder: Path) -> Iterator[None]:
    """Keep `remove_abandoned` of other processes from removing an unfinished folder while the block runs."""
    directory = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def remove_abandoned(folders: Path) -> None:
    """Remove the unfinished folders in `folders` whose processes have ended without removing them.

    Folders younger than a minute are left: their process may not have locked them yet.
    """
    for folder in folders.glob(".*-*-*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > UNLOCKED_S and not _is_locked(folder):
                shutil.rmtree(folder)


def _is_locked(folder: Path) -> bool:
    directory = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(directory)
    return False


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
