"""Writes the log of a gateway or engine process without ever blocking it, even on a full disk or an unread pipe."""

from __future__ import annotations

import atexit
import json
import threading
import time
from collections.abc import MutableMapping
from contextlib import suppress
from io import StringIO
from queue import Empty, SimpleQueue
from typing import Any, TextIO
from weakref import WeakSet

import structlog
from structlog.typing import ExcInfo

MOST_LINES = 10_000
"""Maximum number of lines that wait to be written. Further lines are lost."""
GATHERING_S = 0.02
"""Seconds for which lines are gathered into one write, so that the writing thread wakes up rarely."""
LAST_WRITE_S = 1.0
"""Seconds that an ending process waits for its last lines to be written."""


class LossyStream:
    """A text stream whose `write` only queues a line for a thread: a write to a file on a busy disk took 270 ms. Lines
    beyond `MOST_LINES`, and those whose write fails, are lost and counted."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        """Lines to write, the oldest first; None ends the thread."""
        self._thread: threading.Thread | None = None
        self._lost = 0
        self._lock = threading.Lock()
        """Held while the thread is started or `_lost` changes."""
        _STREAMS.add(self)

    def write(self, line: str) -> int:
        if self._thread is None or not self._thread.is_alive():
            self._start()
        if self._lines.qsize() < MOST_LINES:
            self._lines.put(line)
        else:
            self._count_lost(1)
        return len(line)

    def flush(self) -> None:
        """Do nothing: the thread flushes after each of its writes."""

    def close(self, seconds: float = LAST_WRITE_S) -> None:
        """Wait at most `seconds` for the queued lines to be written and the thread to end. A later line starts
        another."""
        if self._thread is None:
            return
        if not self._thread.is_alive() and self._lines.qsize():
            self._start()  # a line came just after the thread had ended
        self._lines.put(None)
        self._thread.join(seconds)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="log", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        is_open = True
        while is_open:
            lines = [self._lines.get()]
            time.sleep(GATHERING_S if lines[0] is not None else 0)
            with suppress(Empty):
                while True:
                    lines.append(self._lines.get_nowait())
            self._put([line for line in lines if line is not None])
            is_open = None not in lines

    def _put(self, lines: list[str]) -> None:
        if not lines:
            return
        lost = self._lost
        if lost:
            lines = [json.dumps({"event": "log_lines_lost", "level": "error", "lines": lost}) + "\n", *lines]
        text, encoding = "".join(lines), self._stream.encoding or "utf-8"
        try:
            # One character that the stream cannot encode would lose all lines of this write.
            self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            self._stream.flush()
        except (OSError, ValueError):  # ValueError: the stream is closed
            self._count_lost(len(lines) - bool(lost))
        else:
            self._count_lost(-lost)

    def _count_lost(self, lines: int) -> None:
        with self._lock:
            self._lost += lines


_STREAMS: WeakSet[LossyStream] = WeakSet()


@atexit.register
def write_last_lines() -> None:
    """Close all `LossyStream`s, each of which waits at most `LAST_WRITE_S` for its lines. Runs at exit; a process that
    skips exit handlers calls it."""
    for stream in list(_STREAMS):
        stream.close()


def log_renderers(stream: TextIO) -> list[Any]:
    """Return the last processors of a structlog configuration for logs written to `stream`, which render JSON lines
    with an ISO time or, if `stream` is a terminal, short lines with the time of day and escaped control characters."""
    if not stream.isatty():
        return [structlog.processors.TimeStamper(fmt="iso"), structlog.processors.JSONRenderer()]
    console = structlog.dev.ConsoleRenderer(pad_event_to=0, exception_formatter=_write_traceback)
    return [structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False), _harmless, console]


def lossy_loggers(stream: TextIO) -> Any:
    """Return a structlog logger factory whose loggers write to `stream` through a `LossyStream`."""
    return structlog.WriteLoggerFactory(LossyStream(stream))  # type: ignore[arg-type]  # it writes and flushes


def printable(text: str) -> str:
    """Return a text with non-printable characters escaped: a client's text may contain commands to a terminal."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def _harmless(logger: Any, method: str, words: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Structlog processor that returns the log line's values with control characters of texts escaped. Other values are
    left to `repr`, which escapes them."""
    return {name: printable(value) if isinstance(value, str) else value for name, value in words.items()}


def _write_traceback(stream: TextIO, error: ExcInfo) -> None:
    text = StringIO()
    structlog.dev.plain_traceback(text, error)
    stream.write("\n".join(map(printable, text.getvalue().split("\n"))))
