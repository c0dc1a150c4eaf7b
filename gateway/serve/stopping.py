"""Stops a gateway process on a signal: gives running requests a grace period, then ends them.

SIGTERM, which orchestrators send, gives running requests `DRAIN_SECONDS` to finish. The first Ctrl-C gives them
`HURRY_SECONDS`; if the process still runs after `FORCE_SECONDS`, it is killed. The second Ctrl-C kills it at once. A
kill loses nothing durable: it leaves the same state as a crash, from which every start recovers.
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

from rich.console import Console

from engine.process.lossy_log import write_last_lines

DRAIN_SECONDS = 10.0
"""Grace period of running requests after SIGTERM. By default Kubernetes kills a pod 30 s after SIGTERM."""
HURRY_SECONDS = 0.5
"""Grace period of running requests after the first Ctrl-C."""
FORCE_SECONDS = 1.7
"""Time from the first Ctrl-C to the kill. The processes that are killed need some time to disappear, too."""
INTERRUPTED = 128 + signal.SIGINT
"""Exit status of a process that was stopped before it served, or that `Stop.force` killed."""


class StoppedEarly(Exception):
    """The process was told to stop before it was ready to serve."""


class Stop:
    """Tells the parts of a process that it must stop, and how soon. Signals reach a `Stop` only after `listen`."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.in_hurry = False
        self._starting: asyncio.Task[object] | None = None
        self._last: list[Callable[[], object]] = []

    @property
    def grace(self) -> float:
        """Grace period of running requests, in seconds."""
        return HURRY_SECONDS if self.in_hurry else DRAIN_SECONDS

    def time_limit(self, seconds: float) -> float:
        """Return a time limit for something to end: `seconds`, but at most `HURRY_SECONDS` in a hurried stop."""
        return min(seconds, HURRY_SECONDS) if self.in_hurry else seconds

    def listen(self, *, hangup: bool) -> None:
        """Handle SIGTERM, SIGINT and, with `hangup`, SIGHUP, which a closed terminal sends. Under nohup SIGHUP stays
        ignored."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.drain)
        loop.add_signal_handler(signal.SIGINT, self.interrupt)
        if hangup and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, self.drain)

    def drain(self) -> None:
        """Ask the process to stop. A start that is not complete is cancelled."""
        self.asked.set()
        if self._starting is not None:
            self._starting.cancel()
            self._starting = None

    def interrupt(self) -> None:
        """Ask the process to stop in a hurry. A second call kills this process and its children at once."""
        if self.in_hurry:
            self.force()
        self.in_hurry = True
        timer = threading.Timer(FORCE_SECONDS, self.force)  # a thread, as the event loop may be busy or closed by then
        timer.daemon = True
        timer.start()
        self.drain()

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Wrap the start: until `started` is called, a request to stop cancels the current task.

        Raises:
            StoppedEarly: the process was asked to stop during the start, or before it.
        """
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
        """Register a callback for `force`, which may call it from any thread. The callback must not wait."""
        self._last.append(kill)

    def force(self) -> None:
        """Call the callbacks that were registered with `on_force`, and end this process without any cleanup."""
        for kill in self._last:
            with suppress(Exception):
                kill()
        with suppress(OSError):
            os.write(2, b"stopped; what had not ended was killed\n")  # not sys.stderr, whose lock may be held
        os._exit(INTERRUPTED)


def tell_stopping(stop: Stop, console: Console) -> None:
    """Print that the process stops, and how to end it sooner."""
    how = "press Ctrl-C again to kill it at once" if stop.in_hurry else "Ctrl-C ends it sooner"
    console.print(f"stopping: running requests have {stop.grace:g} s to end; {how}", highlight=False)


def exit_process(status: int) -> NoReturn:
    """End the process without the finalization of Python, which takes a second on a busy machine and only frees memory
    that the exit frees anyway.

    Call this only after all resources that need closing are closed.
    """
    write_last_lines()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(status)


@contextmanager
def default_interrupt() -> Iterator[None]:
    """Let Ctrl-C end the process silently inside the block, for a phase in which nothing needs cleanup."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
