"""Counts in files the adapter loads that never ended, so that an adapter that kills the engine is not loaded forever: a
file is written before each load and removed after it. `MOST_LOST` of them mean refusal."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path

import structlog

from engine.process.adapter_files import PEFT_FILES, find_gguf

MOST_LOST = 3
"""Unfinished loads after which an adapter is refused. The first may be the fault of another adapter that was loaded at
the same time; two more are not."""

log = structlog.get_logger("engine")


class LoadAttempts:
    """Counts the loads of each adapter during which an engine process died, in one file per adapter, so that an adapter
    whose load kills the engine is refused after `MOST_LOST` loads. Thread-safe."""

    def __init__(self, folder: Path | None) -> None:
        """`folder`, created when needed, keeps the count files from process to process. None disables counting."""
        self._folder = folder
        self._lost = _read_all(folder) if folder else {}
        """Count file -> number of loads during which earlier processes ended."""
        self._own: Counter[Path] = Counter()
        """Count file -> number of loads of its adapter that are under way in this process."""
        self._changed = threading.Condition()
        self._together = 0
        self._alone = False
        """True means that an adapter with unfinished loads is being loaded, or waits for the other loads to end."""

    @contextmanager
    def counted(self, path: str) -> Iterator[None]:
        """While the `with` block loads the adapter at `path`, keep a count file, which remains if the process dies.
        Adapters with unfinished loads are loaded alone. Raises ValueError after `MOST_LOST` loads of the present
        files."""
        if self._folder is None:
            yield
            return
        count = self._folder / _name(path)
        lost = self._lost.get(count, 0) if count.exists() else 0
        if lost >= MOST_LOST:
            raise ValueError(
                f"the engine process ended {lost} times while it loaded this adapter, so it is not loaded again; "
                f"replace its files, or remove {count} to have it tried once more"
            )
        with self._suspect(path, lost) if lost else self._others():
            self._begin(count, lost + 1)
            try:
                yield
            finally:
                self._end(count)

    def forget(self) -> None:
        """Remove the count files of adapter loads under way, because the process ends on request and not because of a
        load."""
        for count in tuple(self._own):
            _remove(count)

    @contextmanager
    def _others(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._alone)
            self._together += 1
        try:
            yield
        finally:
            with self._changed:
                self._together -= 1
                self._changed.notify_all()

    @contextmanager
    def _suspect(self, path: str, lost: int) -> Iterator[None]:
        log.warning("adapter_load_on_trial", path=path, lost=lost)
        with self._changed:
            self._changed.wait_for(lambda: not self._alone)
            self._alone = True
            self._changed.wait_for(lambda: not self._together)
        try:
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()

    def _begin(self, count: Path, attempts: int) -> None:
        with self._changed:
            self._own[count] += 1
            if self._own[count] == 1:
                _write(count, attempts)

    def _end(self, count: Path) -> None:
        with self._changed:
            self._own[count] -= 1
            if not self._own[count]:
                del self._own[count]
                self._lost.pop(count, None)
                _remove(count)


def _name(path: str) -> str:
    """Return the name of an adapter's count file: a digest of the path and of the sizes and modification times of its
    files, so that replaced files start with a count of 0."""
    digest = blake2b(os.fsencode(path), digest_size=16)
    for file in _files(Path(path)):
        try:
            status = os.stat(file)
        except (OSError, ValueError):
            continue
        digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns} ".encode())
    return digest.hexdigest()


def _files(path: Path) -> tuple[Path, ...]:
    with suppress(OSError, ValueError):
        if file := find_gguf(path):
            return (file,)
    return tuple(path / name for name in PEFT_FILES)


def _read_all(folder: Path) -> dict[Path, int]:
    """Return, by count file, the number of loads of its adapter during which an engine process ended. A file without a
    readable number counts as one load."""
    return {count: _read(count) for count in folder.glob("*")}


def _read(count: Path) -> int:
    try:
        return int(count.read_text())
    except (OSError, ValueError):
        return 1


def _write(count: Path, attempts: int) -> None:
    temporary = count.with_suffix(".new")
    try:
        count.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(str(attempts))
        temporary.replace(count)
    except OSError as error:  # a full disk is no reason to serve nothing
        log.warning("adapter_load_not_counted", path=str(count), error=str(error))


def _remove(count: Path) -> None:
    try:
        count.unlink(missing_ok=True)
    except OSError as error:
        log.warning("adapter_load_not_counted", path=str(count), error=str(error))
