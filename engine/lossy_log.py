"""Where a process of ours writes its log, and how: a terminal, a file on a full disk, or a pipe that is not read."""

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
"""Lines that wait to be written. More are lost."""
GATHERING_S = 0.02
"""Seconds for which lines are gathered into one write, so that the writing thread wakes seldom."""
LAST_WRITE_S = 1.0
"""Seconds that the end of a process waits for lines to be written."""


class LossyStream:
    """Passes lines on from a thread of its own, so that a slow disk or a pipe that is not read delays nothing else.

    A write to a file on a busy disk took 270 ms, in which the event loop served no request. Lines that cannot be
    written are lost, and a line says how many as soon as one can be.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        """None ends the thread."""
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
        """Do nothing: the thread flushes."""

    def close(self, seconds: float = LAST_WRITE_S) -> None:
        """Write what waits, for at most so long. A line that comes later starts the thread again."""
        if self._thread is None:
            return
        if not self._thread.is_alive() and self._lines.qsize():
            self._start()  # a line came just behind the end of the last thread
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
    """Have all streams write what waits. Called when Python ends, and before a process ends without that."""
    for stream in list(_STREAMS):
        stream.close()


def log_renderers(stream: TextIO) -> list[Any]:
    """Returns structlog's last processors: JSON lines, or on a terminal short ones with the time of day."""
    if not stream.isatty():
        return [structlog.processors.TimeStamper(fmt="iso"), structlog.processors.JSONRenderer()]
    console = structlog.dev.ConsoleRenderer(pad_event_to=0, exception_formatter=_write_traceback)
    return [structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False), _harmless, console]


def lossy_loggers(stream: TextIO) -> Any:
    """A factory for structlog."""
    return structlog.WriteLoggerFactory(LossyStream(stream))  # type: ignore[arg-type]  # it writes and flushes


def printable(text: str) -> str:
    """Return a text with its control characters escaped: what a client sends may be a command to a terminal."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def _harmless(logger: Any, method: str, words: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Escape the texts of a line. Values of other types are shown by `repr`, which does it; JSON does it as well."""
    return {name: printable(value) if isinstance(value, str) else value for name, value in words.items()}


def _write_traceback(stream: TextIO, error: ExcInfo) -> None:
    text = StringIO()
    structlog.dev.plain_traceback(text, error)
    stream.write("\n".join(map(printable, text.getvalue().split("\n"))))
