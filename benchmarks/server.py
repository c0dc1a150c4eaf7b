"""Starts `loralane serve` for a benchmark, and stops it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx

KEY = "sk-demo-acme"
START_SECONDS = 300.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(model: Path, adapters: Mapping[str, Path], data_dir: Path, log: Path) -> Iterator[str]:
    """Yields the base URL of a gateway that is ready. Raises RuntimeError if it is not in time."""
    port = free_port()
    command = [sys.executable, "-m", "gateway", "serve", "--model", str(model), "--data-dir", str(data_dir)]
    command += ["--http-port", str(port), "--grpc-port", str(free_port())]
    command += [f"--lora={name}={folder}" for name, folder in adapters.items()]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ)
    try:
        _wait(process, f"http://127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/ready").is_success:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise RuntimeError(f"the server did not become ready; its log is {log}:\n{log.read_text()[-2000:]}")
