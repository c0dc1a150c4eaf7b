"""Stops a gateway process on a signal: gives running requests a grace period, then ends them.

SIGTERM, which orchestrators send, begins a drain, which has the seconds of `http.drain_seconds` (see
`gateway.serve.departure`). The first Ctrl-C, or a second SIGTERM, gives running requests `HURRY_SECONDS`; if the
process still runs after `FORCE_SECONDS`, it is killed. The second Ctrl-C kills it at once. A kill loses nothing
durable: it leaves the same state as a crash, from which every start recovers.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from engine.process.lossy_log import write_last_lines
from gateway.terminal.console import Console

DRAIN_SECONDS = 600.0
"""Grace period of running requests after SIGTERM where no configuration says another."""
HURRY_SECONDS = 0.5
"""Grace period of running requests after the first Ctrl-C, or a second SIGTERM."""
FORCE_SECONDS = 1.7
"""Time from the first Ctrl-C to the kill. The processes that are killed need some time to disappear, too."""
ORPHAN_SECONDS = 5.0
"""Maximum grace period of running requests once the process that started this one has ended."""
INTERRUPTED = 128 + signal.SIGINT
"""Exit status of a process that was stopped before it served, or that `Stop.force` killed."""


class StoppedEarly(Exception):
    """The process was told to stop before it was ready to serve."""


class Stop:
    """State of a process's stop, created once per process: `asked` is set when it must stop, and `hurried` after Ctrl-C
    or a second SIGTERM. Signals change it only after `listen`."""

    def __init__(self, drain_seconds: float = DRAIN_SECONDS) -> None:
        """`drain_seconds` is the grace period of running requests after SIGTERM."""
        self.asked = asyncio.Event()
        self.hurried = asyncio.Event()
        self.drain_seconds = drain_seconds
        self.is_orphan = False
        """True once the process that started this one has ended; another may be about to start in its place."""
        self._starting: asyncio.Task[object] | None = None
        self._last: list[Callable[[], object]] = []

    @property
    def in_hurry(self) -> bool:
        return self.hurried.is_set()

    @property
    def grace(self) -> float:
        """Grace period of running requests in seconds: `drain_seconds`, or HURRY_SECONDS in a hurried stop."""
        return min(HURRY_SECONDS, self.drain_seconds) if self.in_hurry else self.drain_seconds

    def time_limit(self, seconds: float) -> float:
        """Return the seconds that a part of the process may take to end: `seconds`, but at most HURRY_SECONDS in a
        hurried stop."""
        return min(seconds, HURRY_SECONDS) if self.in_hurry else seconds

    def listen(self, *, hangup: bool, has_parent: bool = False) -> None:
        """Install handlers in the running event loop: SIGTERM calls `terminate`, SIGINT calls `interrupt` and, with
        `hangup`, SIGHUP, which a closed terminal sends, calls `drain` unless it is ignored, as under nohup.

        `has_parent` means that another process passes signals on, and sends SIGINT for a hurried stop. SIGTERM then
        calls `drain`: who stops a group of processes sends it to both, so that it comes twice.
        """
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.drain if has_parent else self.terminate)
        loop.add_signal_handler(signal.SIGINT, self.interrupt)
        if hangup and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, self.drain)

    def drain(self) -> None:
        """Set `asked`, so that the process stops, and cancel the task in `starting` if the start is not complete."""
        self.asked.set()
        if self._starting is not None:
            self._starting.cancel()
            self._starting = None

    def terminate(self) -> None:
        """Call `drain` or, if the process was asked to stop before, `interrupt`, unless the stop is a hurried one."""
        if not self.asked.is_set():
            self.drain()
        elif not self.in_hurry:
            self.interrupt()

    def interrupt(self) -> None:
        """Begin a hurried stop: set `hurried`, call `drain`, and start a timer that calls `force` after FORCE_SECONDS.
        A second call calls `force` at once."""
        if self.in_hurry:
            self.force()
        self.hurried.set()
        timer = threading.Timer(FORCE_SECONDS, self.force)  # a thread, as the event loop may be busy or closed by then
        timer.daemon = True
        timer.start()
        self.drain()

    def orphan(self) -> None:
        """Set `is_orphan`, and shorten the grace period to ORPHAN_SECONDS."""
        self.is_orphan = True
        self.drain_seconds = min(self.drain_seconds, ORPHAN_SECONDS)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Context manager for the start: until `started` is called, a request to stop cancels the current task. Raises
        StoppedEarly if the process was asked to stop during the start, or before it."""
        self._starting = asyncio.current_task()
        try:
            if self.asked.is_set():
                raise StoppedEarly
            yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self.asked.is_set() or task is None or task.uncancel() > 0:
                raise
            raise StoppedEarly from None
        finally:
            self._starting = None

    def started(self) -> None:
        """Mark the start as complete: from now on a request to stop only sets `asked`."""
        self._starting = None

    def on_force(self, kill: Callable[[], object]) -> None:
        """Register the callback `kill`, which `force` calls, possibly from another thread. It must not block; its
        exceptions are ignored."""
        self._last.append(kill)

    def force(self) -> None:
        """Call the callbacks of `on_force`, print that the process is stopped, and end the process with status
        INTERRUPTED, without any cleanup. Does not return."""
        for kill in self._last:
            with suppress(Exception):
                kill()
        with suppress(OSError):
            os.write(2, b"stopped; what had not ended was killed\n")  # not sys.stderr, whose lock may be held
        os._exit(INTERRUPTED)


def tell_stopping(stop: Stop, console: Console) -> None:
    """Print that the process stops, and how to end it sooner."""
    how = "press Ctrl-C again to kill it at once" if stop.in_hurry else "Ctrl-C or another SIGTERM ends it sooner"
    console.print(f"stopping: running requests have {stop.grace:g} s to end; {how}", highlight=False)


def exit_process(status: int) -> NoReturn:
    """Write the last log lines, flush the standard streams, and end the process with `status`, without Python's
    finalization, which takes a second on a busy machine. Call this only after all resources are closed."""
    write_last_lines()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(status)


@contextmanager
def default_interrupt() -> Iterator[None]:
    """Within the block, let Ctrl-C end the process at once and without a traceback; then restore the previous handler.
    Has no effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
