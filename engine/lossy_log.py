"""Where a process of ours writes its log: a stream that may be a file on a full disk, or a pipe that nobody reads."""

from __future__ import annotations

import json
from typing import Any, TextIO

import structlog


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


def lossy_loggers(stream: TextIO) -> Any:
    """A factory for structlog."""
    return structlog.WriteLoggerFactory(LossyStream(stream))  # type: ignore[arg-type]  # it writes and flushes
