"""Ctrl-C to `loralane serve`, as processes: everything that it has started is gone, and there is no traceback."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from contextlib import suppress

import httpx
import psutil
import pytest

from tests.e2e.test_hangup import PORTS, SECONDS, heard, started

CHAT = {
    "messages": [{"role": "user", "content": "Tell me a long story."}],
    "stream": True,
    "max_tokens": 7000,
    "min_tokens": 7000,
}


def family(process, member="engine.serve.server"):
    """The processes that one has started, once one that runs the module `member` is among them."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        found = psutil.Process(process.pid).children(recursive=True)
        if any(member in word for child in found for word in command(child)):
            return found
        time.sleep(0.05)
    raise AssertionError(f"no {member} was started")


def command(child):
    with suppress(psutil.Error):
        return child.cmdline()
    return []


def assert_gone(process, children):
    """Generous in time: CI is busy, and one that is left behind stays for good."""
    process.wait(SECONDS)
    _, left = psutil.wait_procs(children, timeout=SECONDS)
    assert not left


def test_ctrl_c_ends_a_start(tiny_model, tmp_path):
    with started(tmp_path, "--model", str(tiny_model), *PORTS) as (process, log):
        children = family(process)
        process.send_signal(signal.SIGINT)
        assert_gone(process, children)
        assert process.returncode == 130
        assert log.read_text().startswith("stopped")
        assert "Traceback" not in log.read_text()


@pytest.fixture
def long_model(tiny_model, tmp_path):
    """Return the folder of a copy of the tiny model that may answer for longer than a stopping gateway waits."""
    folder = shutil.copytree(tiny_model, tmp_path / "long")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    return folder


def test_ctrl_c_ends_streams(long_model, tmp_path):
    with started(tmp_path, "--model", str(long_model), *PORTS) as (process, log):
        url = re.search(r"http://127\.0\.0\.1:\d+", heard(process, log, "Ctrl-C stops it"))[0]
        children, lines = family(process), []
        body, headers = {"model": long_model.name, **CHAT}, {"authorization": "Bearer sk-demo-acme"}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers, timeout=SECONDS) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if not lines:
                    process.send_signal(signal.SIGINT)
                lines.append(line)
        assert_gone(process, children)
        assert "Traceback" not in log.read_text()
        error, done = [line for line in lines if line][-2:]
        assert json.loads(error.removeprefix("data: "))["error"]["message"] == "the gateway is stopping; try again"
        assert done == "data: [DONE]"


def test_a_second_ctrl_c_kills_what_has_not_ended(tiny_model, tmp_path):
    """An engine that hangs could not be stopped in order, however long that took."""
    with started(tmp_path, "--model", str(tiny_model), *PORTS) as (process, log):
        heard(process, log, "Ctrl-C stops it")
        children = family(process)
        [engine] = [child for child in children if "engine.serve.server" in command(child)]
        engine.suspend()
        process.send_signal(signal.SIGINT)
        heard(process, log, "stopping: running requests have")
        process.send_signal(signal.SIGINT)
        assert_gone(process, children)
        assert process.returncode == 130
        assert log.read_text().endswith("stopped; what had not ended was killed\n")
        assert "Traceback" not in log.read_text()


@pytest.mark.parametrize(("moment", "presses"), [("begun", 1), ("a folder is there", 1), ("a folder is there", 2)])
def test_ctrl_c_ends_a_preparation_and_leaves_nothing(tmp_path, moment, presses):
    models = tmp_path / "data" / "models"
    with started(tmp_path, "--model", "embedded", *PORTS) as (process, log):
        children = family(process, "engine.model.folders.prepare")
        heard(process, log, "reading the tokenizer")
        while moment != "begun" and not list(models.glob(".*")):
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        for _ in range(presses):
            process.send_signal(signal.SIGINT)
            time.sleep(0.01)  # two signals that are pending at once would be one
        assert_gone(process, children)
        assert process.returncode == 130
        assert "Traceback" not in log.read_text()
        assert list(models.glob("*")) == []
