"""Keeps a router loaded from a file, and loads it again when the file changes."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import structlog

from gateway.virtual_models.router import LearnedRouter, load_router

CHECK_SECONDS = 1.0
"""Seconds between two looks at a file."""

log = structlog.get_logger("routes")


class RouterSource:
    """Router that is loaded again when its file changes. If the changed file is invalid, that is logged once and the
    previous router stays in use."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ValueError if the file is no router. `clock` returns seconds."""
        self._path = path
        self._clock = clock
        self._state = self._file_state()
        self._router = load_router(path)
        self._looked = clock()

    def current(self) -> LearnedRouter:
        """Return the router of the file as it was at most CHECK_SECONDS ago."""
        now = self._clock()
        if now - self._looked >= CHECK_SECONDS:
            self._looked = now
            self._look()
        return self._router

    def _look(self) -> None:
        state = self._file_state()
        if state == self._state:
            return
        self._state = state
        try:
            self._router = load_router(self._path)
        except ValueError as error:
            log.warning("router_refused", error=str(error), in_use=self._router.version)
        else:
            log.info("router_changed", file=str(self._path), version=self._router.version)

    def _file_state(self) -> tuple[int, ...]:
        """Return a key that changes when the file is written again or replaced. Empty means that there is no file."""
        try:
            status = self._path.stat()
        except OSError:
            return ()
        return (status.st_ino, status.st_size, status.st_mtime_ns)


@cache
def router_source(path: Path) -> RouterSource:
    """Return the `RouterSource` of a file; all callers in a process share one per path. Raises ValueError if the file
    is no router."""
    return RouterSource(path)
