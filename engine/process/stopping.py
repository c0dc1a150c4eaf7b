"""Calls a function when the process must stop: on a signal, or at the end of standard input. Reads lines from it, too,
with `os.read`: a thread that holds the lock of `sys.stdin` as the interpreter ends is a fatal error."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from threading import Thread

READ_BYTES = 4096


def stop_with_signals(stop: Callable[[], object], drain: Callable[[], object] | None = None) -> None:
    """Have a new thread call `stop` on SIGINT or SIGTERM, which then no longer end the process by themselves. With
    `drain`, that is called in place of `stop` if the first signal is SIGTERM. Call this in the main thread."""
    # Python runs signal handlers in the main thread, which sleeps in an idle engine; the thread waits for the byte that
    # Python writes to a pipe when a signal arrives.
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)

    def wait() -> None:
        first = os.read(told, 1)  # the number of the signal
        if drain is not None and first == bytes([signal.SIGTERM]):
            drain()
            os.read(told, 1)
        stop()

    Thread(target=wait, daemon=True).start()


def stop_with_stdin(stop: Callable[[], object]) -> None:
    """Have a new thread read and discard standard input, a pipe from the parent process, and call `stop` at its end."""

    def wait() -> None:
        while os.read(0, READ_BYTES):
            pass
        stop()

    Thread(target=wait, daemon=True).start()


def read_line_of_stdin() -> str:
    """Wait for a line of standard input, to which the sender may add nothing before it was read, and return it without
    its newline. Raises EOFError if standard input ends before."""
    line = b""
    while not line.endswith(b"\n"):
        if not (read := os.read(0, READ_BYTES)):
            raise EOFError
        line += read
    return line.decode().removesuffix("\n")
