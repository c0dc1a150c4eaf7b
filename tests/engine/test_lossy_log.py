"""A log that cannot be written takes nothing else with it."""

from __future__ import annotations

import errno
import io
import json
import re

import pytest
import structlog

from engine.lossy_log import log_renderers, lossy_loggers


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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("path", ["/\x1b[2J\x1b]0;owned\x07", "/a\nforged", "/\x9b31m", "/\u202eevil", "/\x1b[31m red"])
def test_what_a_client_sent_is_no_command_to_a_terminal(path):
    stream = Terminal()
    log = structlog.wrap_logger(lossy_loggers(stream)(), processors=log_renderers(stream))
    log.msg("request " + path, path=path, tags=[path])
    try:
        raise ValueError(path)
    except ValueError:
        log.msg("failed", exc_info=True)
    ours = re.sub(r"\x1b\[\d*m", "", stream.getvalue())  # the renderer's own colours, if it has any
    for line in ours.splitlines():
        assert line.isprintable(), line
    assert "Traceback (most recent call last):" in ours
    first, second = ours.split("\n")[:2]
    assert "request /" in first and "tags=" in first and "failed" in second
