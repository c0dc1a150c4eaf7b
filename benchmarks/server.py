"""Starts and stops servers for benchmarks."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

KEY = "sk-demo-acme"
START_SECONDS = 600.0
STOP_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Command:
    """How to start a server, and how to tell that it is ready."""

    words: Sequence[str]
    url: str
    ready: str
    """URL path that answers 200 once requests can be sent."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables added to this process's own."""
    cpus: frozenset[int] = frozenset()
    """Cores that the server is pinned to; empty means all."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def demo(data_dir: Path, *words: str, env: Mapping[str, str] | None = None) -> Command:
    """Return a loralane server with the demo's settings, whose command ends with `words`."""
    port = free_port()
    own = [sys.executable, "-m", "gateway", "serve", "--data-dir", str(data_dir)]
    own += ["--http-port", str(port), "--grpc-port", str(free_port())]
    return Command([*own, *words], f"http://127.0.0.1:{port}", "/ready", env or {})


def serving(model: Path, adapters: Mapping[str, Path], data_dir: Path, log: Path) -> AbstractContextManager[str]:
    """Run a loralane server with the demo's settings; yields its URL. Raises RuntimeError if it does not start."""
    command = demo(data_dir, "--model", str(model), *(f"--lora={name}={folder}" for name, folder in adapters.items()))
    return running(command, log)


@contextmanager
def running(command: Command, log: Path) -> Iterator[str]:
    """Run a server until the block ends; yields its base URL when it is ready. Raises RuntimeError if it never is."""
    with launched(command, log):
        yield command.url


@contextmanager
def launched(command: Command, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until the block ends; yields its process when it is ready. Raises RuntimeError if it ends before, or
    is not ready after START_SECONDS."""
    with log.open("w") as output, pinned(command.cpus):
        # In its own session, so that its child processes can be killed with it.
        process = subprocess.Popen(
            command.words, stdout=output, stderr=output, env={**os.environ, **command.env}, start_new_session=True
        )
    try:
        _wait(process, command.url + command.ready, log)
        yield process
    finally:
        _stop(process)


@contextmanager
def pinned(cpus: frozenset[int]) -> Iterator[None]:
    """Pin this process to some cores until the block ends; empty means no pinning.

    Processes that are started inside the block stay pinned.
    """
    if not cpus:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def spin() -> None:
    """Busy-loop until killed."""
    while True:
        pass


@contextmanager
def beside(*work: Callable[[], None]) -> Iterator[None]:
    """Run each function in its own process until the block ends; then kill the processes."""
    processes = [multiprocessing.get_context("fork").Process(target=target, daemon=True) for target in work]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    with httpx.Client() as client:  # one for all polls: to create one takes 50 ms of a core that the server needs
        while time.monotonic() < deadline and process.poll() is None:
            with suppress(httpx.TransportError):
                if client.get(url).is_success:
                    return
            time.sleep(0.05)
    raise RuntimeError(f"the server did not become ready; its log is {log}:\n{log.read_text()[-2000:]}")
