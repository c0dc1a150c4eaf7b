"""The demo, served by a process of its own, for the client libraries of configs/constraints-clients.txt. Without these
libraries, as in `make test`, the tests here are not collected; `make test-clients` installs them and runs all."""

import sys
from importlib.util import find_spec

import pytest

from benchmarks.server import Command, free_port, running

collect_ignore_glob = [] if find_spec("langchain_tests") else ["test_*.py"]


@pytest.fixture(scope="session")
def url(smollm2, data_dir, tmp_path_factory):
    """Return the base URL of the demo's OpenAI API, served until the session ends."""
    port = free_port()
    words = [sys.executable, "-m", "gateway", "serve", "--data-dir", str(data_dir)]
    words += ["--http-port", str(port), "--grpc-port", str(free_port())]
    log = tmp_path_factory.mktemp("demo") / "serve.log"
    with running(Command(words, f"http://127.0.0.1:{port}", "/ready"), log) as address:
        yield f"{address}/v1"
