"""A hang shows from outside, and a crash is told from a kill."""

import os
import signal
import subprocess
import sys

import pytest

from engine.process.pulse import FILE_BYTES, Beat, Pulse, read_beat
from gateway.serve import watch
from gateway.serve.watch import LOOK_SECONDS, LOOKS, PulseWatch, is_stopped, is_traced

PATIENCE = 5.0


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def pulse(tmp_path, clock):
    return Pulse(tmp_path / "pulse", "life", clock)


@pytest.fixture
def hang(tmp_path, clock):
    return PulseWatch(tmp_path / "pulse", clock)


def look(hang, clock, seconds=LOOK_SECONDS):
    clock.now += seconds
    return hang.hangs(os.getpid())


def test_a_beat_is_read_as_it_was_written(tmp_path, pulse, clock):
    path = tmp_path / "pulse"
    assert read_beat(path) is None
    pulse.beat(PATIENCE, ["a", "b"])
    assert read_beat(path) == Beat("life", clock.now, PATIENCE, ("a", "b"))
    pulse.beat(PATIENCE)
    assert read_beat(path) == Beat("life", clock.now, PATIENCE, ())


def test_more_requests_than_the_file_holds_are_cut_off(tmp_path, pulse):
    pulse.beat(PATIENCE, ["x" * 50] * 10_000)
    beat = read_beat(tmp_path / "pulse")
    assert 0 < len(beat.request_ids) < 10_000
    assert (tmp_path / "pulse").stat().st_size == FILE_BYTES


def test_no_file_and_an_empty_one_say_nothing(tmp_path):
    assert read_beat(tmp_path / "none") is None
    (tmp_path / "empty").touch()
    assert read_beat(tmp_path / "empty") is None


def test_a_loop_that_is_silent_for_longer_than_it_said_hangs(pulse, hang, clock):
    assert not look(hang, clock), "an engine that loads its model is not watched"
    pulse.beat(PATIENCE)
    looks = 0
    while not look(hang, clock):
        looks += 1
    assert PATIENCE < (looks + 1) * LOOK_SECONDS <= PATIENCE + LOOKS * LOOK_SECONDS
    pulse.beat(PATIENCE)
    assert not look(hang, clock)


def test_a_stall_of_the_process_that_looks_says_nothing(pulse, hang, clock):
    pulse.beat(PATIENCE)
    assert not any(look(hang, clock, 60.0) for _ in range(10))


def test_a_debugger_explains_silence(pulse, hang, clock, monkeypatch):
    monkeypatch.setattr(watch, "is_traced", lambda pid: True)
    pulse.beat(PATIENCE)
    assert not any(look(hang, clock) for _ in range(30))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_a_stopped_process_is_told_from_one_that_runs():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert is_stopped(process.pid)
        assert not is_traced(process.pid)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("code", "crashed"),
    [
        (0, False),
        (1, True),
        (-signal.SIGSEGV, True),
        (-signal.SIGABRT, True),
        (-signal.SIGKILL, False),
        (-signal.SIGTERM, False),
    ],
)
def test_what_ended_a_process(hang, code, crashed):
    assert hang.crashed(code) is crashed


def test_a_kill_for_want_of_memory_is_a_crash(hang, monkeypatch):
    kills = watch._kills_for_memory()
    monkeypatch.setattr(watch, "_kills_for_memory", lambda: kills + 1)
    assert hang.crashed(-signal.SIGKILL)
