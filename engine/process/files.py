"""Paths in the data directory, and `flock` locks on its folders, which the kernel releases when their process ends."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

UNLOCKED_S = 60.0
"""Seconds after its last change for which an unfinished folder without a lock is not taken for an abandoned one."""


def default_data_dir(env: Mapping[str, str]) -> Path:
    """Return the default folder of prepared models and the embedded store, read from the environment `env`:
    $LORALANE_DATA_DIR, or `loralane` in the XDG data folder. The folder need not exist."""
    if env.get("LORALANE_DATA_DIR"):
        return Path(env["LORALANE_DATA_DIR"])
    return Path(env.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "loralane"


def partial_prefix(name: str, pid: int) -> str:
    """Return the name prefix of the temporary folder that process `pid` fills before it becomes the folder `name`."""
    return f".{name}-{pid}-"


def partials(data_dir: Path, pid: int) -> list[Path]:
    """Return the sorted paths of the unfinished model folders, in `data_dir`/models, that process `pid` has created."""
    return sorted((data_dir / "models").glob(f".*-{pid}-*"))


def remove_partials(data_dir: Path, pid: int) -> None:
    """Remove the unfinished model folders of process `pid`, which has ended. Errors are ignored."""
    for folder in partials(data_dir, pid):
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def appearing(out: Path) -> Iterator[Path]:
    """Yield an empty folder, which becomes `out` when the `with` block ends, whole or not at all; one that another
    process made is kept. Removes folders that ended processes left unfinished. Raises OSError."""
    out.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(out.parent)
    partial = Path(tempfile.mkdtemp(prefix=partial_prefix(out.name, os.getpid()), dir=out.parent))
    try:
        with filling(partial):
            yield partial
            partial.chmod(0o755)
            try:
                os.replace(partial, out)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yield the path of a file to be written, which replaces `file` at once when the `with` block ends, and is removed
    if the block raises. Creates the parent folder. Raises OSError if the system refuses an operation."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        yield temporary
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def filling(folder: Path) -> Iterator[None]:
    """While the `with` block runs, hold a lock on an existing, unfinished folder, so that `remove_abandoned` of other
    processes spares it. Waits for the lock on entry."""
    directory = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def remove_abandoned(folders: Path) -> None:
    """Remove the unfinished folders in `folders` (see `partial_prefix`) that no process has locked with `filling`,
    except those changed within a minute, which may not be locked yet. Errors are ignored."""
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
"""Name of the file in a folder that is locked while a process uses the folder."""


@contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """While the `with` block runs, hold a shared lock on a folder, which is created, so that `take` fails for other
    processes. Waits on entry while another has taken it; locks nothing if it cannot write."""
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
    """Try to lock a folder for this process alone, without waiting. Return the lock file, which holds the lock until it
    is closed, or None if another process uses it. Raises FileNotFoundError if it was never `in_use`."""
    file = (folder / LOCK).open("r")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file
