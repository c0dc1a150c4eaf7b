"""Tells from outside whether an engine process hangs, and after its end whether a request may have caused it.

An engine that hangs cannot be asked. Its step loop keeps a pulse (`engine.pulse`); a loop that has been silent for
longer than it announced, at two looks in a row, has hung. A debugger that holds the process explains the silence, and
so does a stall of the process that looks: then the whole machine may have stood still.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

from engine.pulse import Beat, read_beat

LOOK_SECONDS = 1.0
"""Between two looks."""
OWN_STALL_SECONDS = 2.0
"""A look that comes so much later than it should says nothing about the engine."""
LOOKS = 2
"""Looks in a row that must find the loop silent."""
CRASHES = frozenset((signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS))
"""Signals that a process causes itself. Others are sent to it: by an operator, a test, or the kernel."""


class HangWatch:
    """What is known of one engine process from its pulse."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """`path` is the pulse's file; `clock` is the system's monotonic one, in seconds."""
        self._path = path
        self._clock = clock
        self._looked = clock()
        self._silent = 0
        self._out_of_memory = _kills_for_memory()

    def last_beat(self) -> Beat | None:
        """Return what the step loop last said; None means that it has not begun."""
        return read_beat(self._path)

    def hangs(self, pid: int) -> bool:
        """Look once. To be called every `LOOK_SECONDS`; a hang shows after `LOOKS` calls."""
        now, beat = self._clock(), self.last_beat()
        stalled = now - self._looked > LOOK_SECONDS + OWN_STALL_SECONDS
        self._looked = now
        silent = beat is not None and now - beat.at > beat.patience and not stalled and not is_traced(pid)
        self._silent = self._silent + 1 if silent else 0
        return self._silent >= LOOKS

    def crashed(self, code: int) -> bool:
        """Return whether something that the process computed may have ended it, by its exit code.

        The kernel kills a process that asks for more memory than there is with the signal that an operator would use;
        its own count of such kills tells the two apart.
        """
        if code >= 0:
            return code > 0
        return -code in CRASHES or (-code == signal.SIGKILL and _kills_for_memory() > self._out_of_memory)


def is_traced(pid: int) -> bool:
    """Return whether a debugger is attached to a process."""
    return _status(pid).get("TracerPid", "0") != "0"


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped a process (SIGSTOP, or Ctrl-Z)."""
    return _status(pid).get("State", "").startswith("T")


def _status(pid: int) -> dict[str, str]:
    """Return what the kernel says of a process; empty where it does not say, as on macOS."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _kills_for_memory() -> int:
    """Return how many processes the kernel has killed for want of memory since it started."""
    try:
        words = Path("/proc/vmstat").read_text().split()
    except OSError:
        return 0
    return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else 0
