"""A log that cannot be written takes nothing else with it."""

from __future__ import annotations

import errno
import io
import json

import structlog

from engine.lossy_log import lossy_loggers


class FullDisk(io.StringIO):
    """Takes nothing while it is full."""

    is_full = False

    def flush(self) -> None:
        if self.is_full:
            self.truncate(self.kept)
            self.seek(self.kept)
            raise OSError(errno.ENOSPC, "No space left on device")
        self.kept = self.tell()


def test_lines_that_cannot_be_written_are_lost_and_counted():
    stream = FullDisk()
    log = structlog.wrap_logger(lossy_loggers(stream)(), processors=[structlog.processors.JSONRenderer()])
    log.msg("before")
    stream.is_full = True
    log.msg("lost")
    log.msg("lost as well")
    stream.is_full = False
    log.msg("after")
    log.msg("and after that")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["before", "log_lines_lost", "after", "and after that"]
    assert lines[1]["lines"] == 2
