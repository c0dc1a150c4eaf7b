"""SIGHUP to `loralane serve`, as processes: with a file it is read again, without one the server stops in order. What
the gateway does is tested, over an engine without a model."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial

import httpx

KEYS = {"ACME": "sk-acme-0123456789", "GLOBEX": "sk-globex-0123456789"}
FILE = """
model: {{source: {model}}}
engine: {{memory_gb: 0.25, threads: 1, dtype: float32}}
http: {{port: 0, drain_seconds: 0.5}}
grpc: {{port: 0}}
tenants:
  acme: {{keys: ["${{ACME}}"]}}
"""
SECONDS = 120.0
REAL = ("-m", "gateway")
FAKE = """
from functools import partial
from gateway.__main__ import main
from gateway.serve import launch
launch.Launch = partial(launch.Launch, engine=("engine.serve.server", "--fake"))
main()
"""
"""A program that is `loralane` but for the engine, which does not import torch."""


@contextmanager
def serving(folder, *arguments, hangup=signal.SIG_DFL):
    """A gateway that serves, as `started`, over an engine without a model."""
    with started(folder, *arguments, hangup=hangup, program=("-c", FAKE)) as (process, log):
        heard(process, log, "Ctrl-C stops it")
        yield process, log


def set_signals(hangup):
    """Undo what the shell that runs the tests may have set."""
    signal.signal(signal.SIGHUP, hangup)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def started(folder, *arguments, hangup=signal.SIG_DFL, program=REAL):
    """Start a server, and yield its process and the file with its standard error.

    `hangup` is what the server does on SIGHUP as it starts, whatever the tests' own process does.
    """
    log = folder / "log"
    command = [sys.executable, *program, "serve", "--data-dir", str(folder / "data"), *arguments]
    with log.open("w") as stream:
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=stream,
            env={**os.environ, **KEYS},
            preexec_fn=partial(set_signals, hangup),
        )
    try:
        yield process, log
    finally:
        process.kill()
        process.wait()


def heard(process, log, words):
    deadline = time.monotonic() + SECONDS
    while words not in log.read_text():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    return log.read_text()


def status(log, key):
    [port] = set(re.findall(r"http://127\.0\.0\.1:(\d+)", log.read_text()))
    return httpx.get(f"http://127.0.0.1:{port}/v1/models", headers={"authorization": f"Bearer {key}"}).status_code


def test_the_file_is_read_again_and_one_that_is_wrong_changes_nothing(tiny_model, tmp_path):
    file = tmp_path / "gateway.yaml"
    before = FILE.format(model=tiny_model)
    file.write_text(before)
    with serving(tmp_path, "--config", str(file)) as (process, log):
        assert (status(log, KEYS["ACME"]), status(log, KEYS["GLOBEX"])) == (200, 401)
        file.write_text(before + '  globex: {keys: ["${GLOBEX}"]}\n')
        process.send_signal(signal.SIGHUP)
        assert "+ tenants.globex.keys: " in heard(process, log, "\nreloaded")
        assert (status(log, KEYS["ACME"]), status(log, KEYS["GLOBEX"])) == (200, 200)
        file.write_text("tenant: {}\n")
        process.send_signal(signal.SIGHUP)
        heard(process, log, "not reloaded: tenant: unknown key; did you mean tenants?")
        assert status(log, KEYS["GLOBEX"]) == 200
        assert not any(key in log.read_text() for key in KEYS.values())
        process.terminate()
        assert process.wait(SECONDS) == 0


PORTS = ("--http-port", "0", "--grpc-port", "0", "--dtype", "float32")


def test_without_a_file_a_terminal_that_closes_stops_it_in_order(tiny_model, tmp_path):
    with serving(tmp_path, "--model", str(tiny_model), *PORTS) as (process, log):
        process.send_signal(signal.SIGHUP)
        heard(process, log, "stopping: running requests have 600 s to end")
        process.send_signal(signal.SIGINT)  # it would serve for some seconds more
        assert process.wait(SECONDS) == 0


def test_nohup_lets_it_outlive_its_terminal(tiny_model, tmp_path):
    with serving(tmp_path, "--model", str(tiny_model), *PORTS, hangup=signal.SIG_IGN) as (process, log):
        process.send_signal(signal.SIGHUP)
        assert status(log, KEYS["ACME"]) == 401, "it answers, and knows no such key"
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 0
