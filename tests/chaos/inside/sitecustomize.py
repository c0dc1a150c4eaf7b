"""Found by every Python process of a plant as it begins: lets a test move its clock, and look at its tasks.

The folder CHAOS_FOLDER holds `clock`, the seconds by which the wall clock is wrong, while it is wrong. A process that
gets SIGUSR1 writes what its tasks are doing to `tasks-PID` there.
"""

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

FOLDER = Path(os.environ["CHAOS_FOLDER"])
STALE_SECONDS = 0.05


class WrongClock:
    """The wall clock, and how far off it is."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._offset = 0.0
        self._read_at = 0.0

    @property
    def offset(self) -> float:
        now = time.monotonic()
        if now - self._read_at > STALE_SECONDS:
            self._read_at = now
            self._offset = float(self._file.read_text()) if self._file.exists() else 0.0
        return self._offset

    def seconds(self, real: Callable[[], float]) -> Callable[[], float]:
        return lambda: real() + self.offset

    def nanoseconds(self, real: Callable[[], int]) -> Callable[[], int]:
        return lambda: real() + int(self.offset * 1e9)


def all_tasks() -> list[asyncio.Task]:
    """Of every loop. asyncio has them in a set that changes while it is read by another thread."""
    known = getattr(asyncio.tasks, "_scheduled_tasks", None) or asyncio.tasks._all_tasks
    for _ in range(1000):
        with suppress(RuntimeError):
            return list(known)
    return []


def tell_tasks() -> None:
    """For good. Other processes that this one starts inherit the blocked signal, and ignore it."""
    while True:
        signal.sigwait({signal.SIGUSR1})
        tasks = [each for each in all_tasks() if not each.done()]
        told = FOLDER / f"tasks-{os.getpid()}.part"
        told.write_text(json.dumps([str(each.get_coro()).split(" at ")[0] for each in tasks]))
        told.rename(told.with_suffix(""))


clock = WrongClock(FOLDER / "clock")
time.time, time.time_ns = clock.seconds(time.time), clock.nanoseconds(time.time_ns)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
threading.Thread(target=tell_tasks, name="chaos-tasks", daemon=True).start()
