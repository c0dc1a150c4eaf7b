"""The demo, served by a process of its own, for the client libraries of configs/constraints-clients.txt. Without these
libraries, as in `make test`, the tests here are not collected; `make test-clients` installs them."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import LOCK_EX, LOCK_SH, LOCK_UN, flock
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.server import Command, free_port, running

collect_ignore_glob = [] if find_spec("langchain_tests") else ["test_*.py"]


@pytest.fixture(scope="session")
def url(smollm2, data_dir, tmp_path_factory):
    """Return the base URL of the demo's OpenAI API. All test processes of a run share one demo, whose steps compute a
    token for each of them in the time of one."""
    port, own = free_port(), tmp_path_factory.getbasetemp()
    words = [sys.executable, "-m", "gateway", "serve", "--data-dir", str(data_dir)]
    words += ["--http-port", str(port), "--grpc-port", str(free_port())]
    command = Command(words, f"http://127.0.0.1:{port}", "/ready")
    with shared(command, own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) as address:
        yield f"{address}/v1"


@contextmanager
def shared(command: Command, folder: Path) -> Iterator[str]:
    """Yield the URL of a server that all processes with the same folder share: the first starts it, and stops it when
    all others are done. Raises RuntimeError if it does not start."""
    address = folder / "demo.url"
    with (folder / "demo.start").open("w") as start, (folder / "demo.users").open("w") as users:
        flock(start, LOCK_EX)
        if address.exists():
            flock(users, LOCK_SH)
            flock(start, LOCK_UN)
            yield address.read_text()
            return
        with running(command, folder / "demo.log") as started:
            address.write_text(started)
            flock(start, LOCK_UN)
            yield started
            flock(start, LOCK_EX)
            flock(users, LOCK_EX)
            address.unlink()
