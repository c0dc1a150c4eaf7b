"""Where a process of ours writes its log, and how: a terminal, a file on a full disk, or a pipe that is not read."""

from __future__ import annotations

import json
from collections.abc import MutableMapping
from io import StringIO
from typing import Any, TextIO

import structlog
from structlog.typing import ExcInfo


class LossyStream:
    """Passes lines on. One that cannot be written is lost, and nothing else: whoever logs is in the middle of something
    that must go on. How many were lost is said as soon as it can be."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lost = 0

    def write(self, line: str) -> int:
        try:
            if self._lost:
                self._put(json.dumps({"event": "log_lines_lost", "level": "error", "lines": self._lost}) + "\n")
            self._put(line)
        except OSError:
            self._lost += 1
        else:
            self._lost = 0
        return len(line)

    def flush(self) -> None:
        """Every line is, by itself."""

    def _put(self, line: str) -> None:
        self._stream.write(line)
        self._stream.flush()


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
