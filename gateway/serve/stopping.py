"""How a process of ours is told to stop, and how much time what runs is given then.

SIGTERM, as orchestrators send it, lets running requests end for `DRAIN_SECONDS`. The first Ctrl-C gives them
`HURRY_SECONDS`, and whatever is left of the process after `FORCE_SECONDS` is killed. The second Ctrl-C kills at once.
Nothing durable is lost by that: it is what a crash leaves, and every start recovers from it.
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

from engine.lossy_log import write_last_lines

DRAIN_SECONDS = 10.0
"""Kubernetes kills a pod 30 s after SIGTERM unless it is told otherwise."""
HURRY_SECONDS = 0.5
FORCE_SECONDS = 1.7
"""From the first Ctrl-C on. The processes that are killed then need some time to be gone, too."""
INTERRUPTED = 128 + signal.SIGINT
"""Exit status of a process that was stopped before it served, or killed by the second Ctrl-C."""


class StoppedEarly(Exception):
    """The process was told to stop before it was ready to serve."""


class Stop:
    """Tells the parts of one process that it is to stop, and how soon. Without `listen` nothing ever asks for it."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.in_hurry = False
        self._starting: asyncio.Task[object] | None = None
        self._last: list[Callable[[], object]] = []

    @property
    def grace(self) -> float:
        """Seconds for which running requests may go on."""
        return HURRY_SECONDS if self.in_hurry else DRAIN_SECONDS

    def within(self, seconds: float) -> float:
        """Returns how long to wait for something that may usually take `seconds` to end."""
        return min(seconds, HURRY_SECONDS) if self.in_hurry else seconds

    def listen(self, *, hangup: bool) -> None:
        """Take over SIGTERM, SIGINT and, with `hangup`, SIGHUP, which a closed terminal sends; nohup ignores it."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.drain)
        loop.add_signal_handler(signal.SIGINT, self.interrupt)
        if hangup and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, self.drain)

    def drain(self) -> None:
        """Ask to stop; a start that is not complete is given up."""
        self.asked.set()
        if self._starting is not None:
            self._starting.cancel()
            self._starting = None

    def interrupt(self) -> None:
        """Ask to stop in a hurry; asked so again, end this process and its children at once."""
        if self.in_hurry:
            self.force()
        self.in_hurry = True
        timer = threading.Timer(FORCE_SECONDS, self.force)  # a thread: the event loop may be busy or gone by then
        timer.daemon = True
        timer.start()
        self.drain()

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Surround the start, up to `started`: being told to stop cancels it.

        Raises:
            StoppedEarly: that has happened.
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
        """From now on, being told to stop only sets `asked`."""
        self._starting = None

    def at_last(self, kill: Callable[[], object]) -> None:
        """Have `force` call this, from any thread: it must not wait."""
        self._last.append(kill)

    def force(self) -> None:
        """Kill what was named to `at_last` and end this process without any further ado."""
        for kill in self._last:
            with suppress(Exception):
                kill()
        with suppress(OSError):
            os.write(2, b"stopped; what had not ended was killed\n")  # a lock of sys.stderr may be held
        os._exit(INTERRUPTED)


def tell_stopping(stop: Stop, console: Console) -> None:
    """Say that the process stops, and how to have it end sooner."""
    how = "press Ctrl-C again to kill it at once" if stop.in_hurry else "Ctrl-C ends it sooner"
    console.print(f"stopping: running requests have {stop.grace:g} s to end; {how}", highlight=False)


def leave(status: int) -> NoReturn:
    """End the process without Python's own end, which takes a second on a busy machine and frees what is free anyway.

    Only after everything that has to be closed is closed.
    """
    write_last_lines()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(status)


@contextmanager
def dying_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process without a word, while there is nothing that had to be cleaned up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
