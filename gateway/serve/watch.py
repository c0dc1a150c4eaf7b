"""Detects from outside whether an engine process hangs, and after its end whether a request may have caused it.

An engine that hangs cannot answer a call. Its step loop writes beats to a pulse file (`engine.process.pulse`). If two
checks in a row find that the last beat is older than the loop announced, the engine hangs. The engine counts as alive
while a debugger is attached to it, and if the checking process itself stalled: then the whole machine may have stood
still.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

from engine.process.pulse import Beat, read_beat

LOOK_SECONDS = 1.0
"""Seconds between two checks."""
OWN_STALL_SECONDS = 2.0
"""A check that is late by more than this never counts the engine as silent: the checking process itself stalled."""
LOOKS = 2
"""Number of checks in a row that must find the engine's last beat overdue before the engine counts as hung."""
CRASHES = frozenset((signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS))
"""Signals that count as a crash, because a process causes them itself. The other signals come from an operator, a test
or the kernel."""


class PulseWatch:
    """Decides from the pulse file of one engine process whether the process hangs and, later, whether it crashed. The
    supervisor creates one for each process."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """`path` is the pulse file; `clock` is the system's monotonic clock, in seconds."""
        self._path = path
        self._clock = clock
        self._looked = clock()
        self._silent = 0
        self._out_of_memory = _kills_for_memory()

    def last_beat(self) -> Beat | None:
        """Read the last beat of the engine's step loop; None means that the loop has not begun."""
        return read_beat(self._path)

    def hangs(self, pid: int) -> bool:
        """Check the pulse of process `pid` once; call this every LOOK_SECONDS. Returns True if at least LOOKS checks in
        a row found its beat overdue, without a stall of this process or a debugger."""
        now, beat = self._clock(), self.last_beat()
        stalled = now - self._looked > LOOK_SECONDS + OWN_STALL_SECONDS
        self._looked = now
        silent = beat is not None and now - beat.at > beat.patience and not stalled and not is_traced(pid)
        self._silent = self._silent + 1 if silent else 0
        return self._silent >= LOOKS

    def crashed(self, code: int) -> bool:
        """Return whether something that the process computed may have ended it, by its exit code (negative: a signal).

        That is a positive exit code, one of the signals CRASHES, or SIGKILL if the kernel has since counted a kill for
        lack of memory: an operator may send SIGKILL, too.
        """
        if code >= 0:
            return code > 0
        return -code in CRASHES or (-code == signal.SIGKILL and _kills_for_memory() > self._out_of_memory)


def is_traced(pid: int) -> bool:
    """Return whether a debugger is attached to a process; False where /proc does not exist."""
    return _status(pid).get("TracerPid", "0") != "0"


def is_stopped(pid: int) -> bool:
    """Return whether a signal (SIGSTOP, or Ctrl-Z) has suspended a process; False where /proc does not exist."""
    return _status(pid).get("State", "").startswith("T")


def _status(pid: int) -> dict[str, str]:
    """Return the fields of /proc/PID/status; empty if there is no such file, as on macOS."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _kills_for_memory() -> int:
    """Return how many processes the kernel has killed since boot because memory ran out; 0 if that is unknown."""
    try:
        words = Path("/proc/vmstat").read_text().split()
    except OSError:
        return 0
    return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else 0
