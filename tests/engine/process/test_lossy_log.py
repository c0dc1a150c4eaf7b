"""A log that cannot be written takes nothing else with it."""

from __future__ import annotations

import errno
import io
import json
import re
import threading

import pytest
import structlog

from engine.process.lossy_log import LossyStream, log_renderers, lossy_loggers, write_last_lines


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
    write_last_lines()
    stream.is_full = True
    log.msg("lost")
    log.msg("lost as well")
    write_last_lines()
    stream.is_full = False
    log.msg("after")
    log.msg("and after that")
    write_last_lines()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["before", "log_lines_lost", "after", "and after that"]
    assert lines[1]["lines"] == 2


class Stuck(io.StringIO):
    """A pipe that is not read until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.released, self.writing = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.writing.set()
        self.released.wait()
        return super().write(text)


def test_a_pipe_that_is_not_read_holds_nothing_up(monkeypatch):
    monkeypatch.setattr("engine.process.lossy_log.MOST_LINES", 3)
    stream = Stuck()
    lossy = LossyStream(stream)
    lossy.write("first\n")
    stream.writing.wait()
    for number in range(5):
        lossy.write(f"{number}\n")
    lossy.close(seconds=0.01)
    stream.released.set()
    lossy.close()
    lossy.write("last\n")
    lossy.close()
    text = stream.getvalue()
    assert text.endswith("last\n")
    assert text.startswith("first\n")
    assert [number for number in range(5) if f"\n{number}\n" in text] == [0, 1, 2]
    assert '"lines": 2' in text


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
    write_last_lines()
    ours = re.sub(r"\x1b\[\d*m", "", stream.getvalue())  # the renderer's own colours, if it has any
    for line in ours.splitlines():
        assert line.isprintable(), line
    assert "Traceback (most recent call last):" in ours
    first, second = ours.split("\n")[:2]
    assert "request /" in first and "tags=" in first and "failed" in second
