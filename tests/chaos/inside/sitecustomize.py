"""Every Python process of a deployment imports this as it starts: it lets a test move its clock and look at its tasks,
and gateways have their grammar workers sooner, for the census counts a process only once it has them.

The folder CHAOS_FOLDER holds `clock`, the seconds by which the wall clock is wrong, while it is. A process that gets
SIGUSR1 writes what its tasks are doing to `tasks-PID` there; one that gets SIGUSR2 says on standard error where its
threads are, for a developer who looks for what hangs.
"""

import asyncio
import builtins
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(os.environ["CHAOS_FOLDER"])
OURS = ("gateway.", "engine.")
STALE_SECONDS = 0.05
GRAMMARS, UNHURRIED_S = "engine.grammar_check.pool", 10.0


class WrongClock:
    """The wall clock, and how far off it is.

    It is wrong for our own code alone. gRPC would compare it with the machine's, which no process can move for itself,
    and wait for hours.
    """

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

    def module(self) -> ModuleType:
        """The module `time`, by this clock."""
        wrong = ModuleType("time")
        wrong.__dict__.update(vars(time))
        wrong.__dict__["time"] = lambda: time.time() + self.offset
        wrong.__dict__["time_ns"] = lambda: time.time_ns() + int(self.offset * 1e9)
        return wrong


def importing(real: Callable[..., Any], wrong_time: ModuleType) -> Callable[..., Any]:
    """`import`, which gives our own modules another `time` than all others, and another `UNHURRIED_S`."""

    def imported(name: str, globals: Any = None, *rest: Any, **more: Any) -> Any:
        if name == "time" and (globals or {}).get("__name__", "").startswith(OURS):
            return wrong_time
        found = real(name, globals, *rest, **more)
        if name == GRAMMARS and hasattr(found, "UNHURRIED_S"):
            found.UNHURRIED_S = UNHURRIED_S
        return found

    return imported


def all_tasks() -> list[asyncio.Task]:
    """Return the tasks of every loop. asyncio has them in a set, under another name since Python 3.12, that changes
    while another thread reads it."""
    known = getattr(asyncio.tasks, "_scheduled_tasks" if sys.version_info >= (3, 12) else "_all_tasks")
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


builtins.__import__ = importing(builtins.__import__, WrongClock(FOLDER / "clock").module())
faulthandler.register(signal.SIGUSR2)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
threading.Thread(target=tell_tasks, name="chaos-tasks", daemon=True).start()
