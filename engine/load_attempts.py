"""Loads of adapters that never ended, counted in files, so that one that kills the engine is not loaded for ever.

A gateway gives a new engine every adapter of its registry. An adapter whose loading takes the engine process down
would do so again in each new life, and no engine would ever be ready. So each load is written down before it begins,
and taken back when it has ended, well or badly. What is found written down belongs to a load during which a process
died: such an adapter is loaded while no other is, and refused when `MOST_LOST` of its loads have never ended.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

import structlog

MOST_LOST = 3
"""The first loss may be another adapter's doing, which was loaded at the same time; two more are not."""
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")

log = structlog.get_logger("engine")


class LoadAttempts:
    """Thread-safe."""

    def __init__(self, folder: Path | None) -> None:
        """`folder` outlives the process, and is created when it is needed. None means that nothing is counted."""
        self._folder = folder
        self._lost = _read_all(folder) if folder else {}
        """Loads that former processes did not live to end, by the file that says so."""
        self._own: Counter[Path] = Counter()
        """Loads that are under way in this process, by their file."""
        self._changed = threading.Condition()
        self._together = 0
        self._alone = False
        """An adapter that is suspect is being loaded, or waits until no other is."""

    @contextmanager
    def counted(self, path: str) -> Iterator[None]:
        """Count a load of the adapter at `path` while the block runs.

        Raises:
            ValueError: too many of its loads have ended with the process.
        """
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
        """Take back the loads that are under way: the process ends because it was told to."""
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
    """Return what an adapter is counted under: its path, sizes and times, so that new files begin anew."""
    digest = blake2b(os.fsencode(path), digest_size=16)
    for name in ADAPTER_FILES:
        try:
            status = os.stat(Path(path) / name)
        except (OSError, ValueError):
            continue
        digest.update(f"{name} {status.st_size} {status.st_mtime_ns} ".encode())
    return digest.hexdigest()


def _read_all(folder: Path) -> dict[Path, int]:
    """Return how many loads have never ended, by the file that says so. A file that says nothing counts as one."""
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
