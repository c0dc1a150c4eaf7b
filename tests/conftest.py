"""What all test folders share: the order of tests, the markers of tiers, and the embedded model, prepared once.

Folders follow the rooms of the code: tests/gateway/limiter tests gateway/limiter. Shared fixtures, by the conftest.py
that defines them:

tests              `logs_as_before` (undoes a test's configuration of logs), `data_dir` (kept between runs), `smollm2`
                   (the folder of the embedded model), `packed_linears` (skips a test where the processor lacks
                   AVX512-BF16)
tests/gateway      `valkey_server` (a real Valkey for the session), `valkey` (a client of it, emptied first), `browser`
                   (Chromium), `console` (a page of the console in it), `cluster_ports` (a Redis cluster of three nodes)
tests/gateway/llm  `tiny_chat` (the folder of a small random model with a chat template), `tiny_adapter` (one of its
                   adapters), `options` (of an engine for them)
tests/e2e          `tiny_model` (the folder of a small random model), `demo` (the demo's configuration), `server` (all
                   of the demo: gateway, engine, model and Valkey), `models` (the names it serves), `client_of` and
                   `client` (OpenAI clients of it)
tests/e2e/behaviour
                   `kind` (each installed client library), `setup` (such a client and a gateway with fakes)
tests/clients      `url` (the base URL of a demo that all test processes share, for client libraries)
tests/kernels      `triton_cache` (compiled kernels, kept between runs)
tests/model        `tiny_llama` (the folder of a small random model)
tests/lab          `device` (costs in round numbers), `make_setup` (a simulated engine on it)
tests/chaos        `audited` (a deployment of real processes, and the auditor that checks it)

Helper modules beside these files make what test files define as fixtures of their own: `gateway_app` is a gateway with
a fake engine and limiter (gateway/fakes.py), `grpc_app` or `api` the same behind a gRPC server (gateway/grpc_app.py),
`cluster` several gateways that work on batches over one Valkey (gateway/batch_cluster.py), and `stepped` an engine that
a test steps by hand (core/virtual.py). gateway/settled_world.py is a gateway on a virtual clock, whose engines,
upstream and limiter do only what a test says.
"""

import gc
import os
import sys

# For servers that tests start: each would compile all modules again. An empty variable is none.
os.environ["PYTHONDONTWRITEBYTECODE"] = ""
# Before gRPC is imported: its fork handlers abort the child of a test process in which other threads use gRPC, between
# fork and exec, as it did once in a run of CI.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# Before torch is imported: each core has a test process of its own, and threads that wait for each other would spin.
os.environ.setdefault("GOMP_SPINCOUNT", "500")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Each TLS context and each client of httpx would load the certificates of all public authorities, in 30 ms of a
# processor, in servers and commands that tests start, too: those in a folder are looked for only when one is needed,
# which no test does, and without a file's name none is read.
os.environ["SSL_CERT_FILE"] = ""
os.environ["SSL_CERT_DIR"] = os.path.dirname(__file__)

from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import settings
from rich.console import Console
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

sys.dont_write_bytecode = False  # each worker would compile all tests again
TESTS = Path(__file__).parent
# A traceback in colours, with the variables of every frame, takes a second.
plain = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
structlog.configure(processors=[*structlog.get_config()["processors"][:-1], plain])
settings.register_profile("nightly")  # see `tests/examples.py`
SERVERS = ("tests/e2e/", "tests/chaos/")
"""Folders whose tests start whole servers, of which only one may run at a time."""
CLASSES = "tests/clients/"
"""The folder whose test classes, one for each client library, share one server that computes for several at a time."""
LONGEST = (
    *SERVERS,
    "tests/gateway/cluster/test_ray.py",
    "tests/clients/test_langchain.py",
    "tests/model/test_parity.py",
    "tests/benchmarks/test_gpu_suite.py",
    "tests/lab/clusters/test_cluster.py",
    "tests/kernels/test_numba_backend.py",
    "tests/core/test_pace.py",
    "tests/model/test_graphs.py",
    "tests/gateway/http/test_openapi.py",
    "tests/gateway/requests/test_resumption.py",
    "tests/kernels/test_triton",
    "tests/model/test_grammar.py",
    "tests/kernels/test_pretended_cuda.py",
    "tests/gateway/serve/test_fleet",
    "tests/gateway/llm/test_llm.py",
    "tests/gateway/console/test_console.py",
    "tests/model/test_peft_parity.py",
    "tests/gateway/batches/test_batch_tasks_lost.py",
    "tests/model/test_parallel.py",
    "tests/model/test_preemption.py",
    "tests/gateway/batches/test_batch_survival.py",
)
"""Files and folders that take 20 s or more each, the longest first. They run first, in this order, so that at
the end no process is left with one."""
SLOW_FOLDERS = frozenset(("benchmarks", "chaos", "clients", "e2e", "fuzz", "kernels", "model"))
"""Folders of `tests` whose tests are all slow: they load models, compile kernels or start whole servers."""
SLOW_FIXTURES = frozenset(("smollm2", "valkey_server", "browser", "cluster_ports"))
"""Fixtures that make a test slow, because they convert a model or start a server or a browser."""
QUICK_ONLY = "not slow"
"""The marker expression (`-m`) of `make test-fast`, for which folders of slow tests are not even imported."""


class OneServer(LoadFileScheduling):
    """Runs test files in parallel, but all tests of SERVERS one after the other in one process, and classes of CLASSES
    in parallel."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(CLASSES):
            return nodeid.rsplit("::", 1)[0]
        return "servers" if nodeid.startswith(SERVERS) else str(super()._split_scope(nodeid))


def turn(item: pytest.Item) -> int:
    """Return the place of a test's file in the order in which files are handed to processes."""
    return next((place for place, name in enumerate(LONGEST) if item.nodeid.startswith(name)), len(LONGEST))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    is_left_out = collection_path.parent == TESTS and collection_path.name in SLOW_FOLDERS
    return True if is_left_out and config.option.markexpr == QUICK_ONLY else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests without garbage collections, which would take a quarter of the time. Later collections leave out
    the objects that exist then, almost a million, because they stay until the end anyway."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # cleanups run in reverse order: this one after pytest's last garbage collection
def pytest_configure(config: pytest.Config) -> None:
    """Let objects be freed at the end, for libraries would report those that stay, after the summary; but only when
    pytest has looked for objects that fail to be freed, which would take two seconds for all."""
    config.add_cleanup(gc.unfreeze)


@pytest.hookimpl(tryfirst=True)  # before pytest drops what `-m` leaves out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=turn)
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        is_slow = folder in SLOW_FOLDERS or not SLOW_FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))
        if is_slow or item.get_closest_marker("nightly"):
            item.add_marker("slow")


def pytest_xdist_auto_num_workers() -> int:
    """Return the number of processes for `-n auto`: one more than cores, because some tests wait; four are enough."""
    return min(4, (os.cpu_count() or 1) + 1)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> OneServer:
    config.option.loadscopereorder = (
        False  # xdist would run the files with the most tests first, which are the quickest
    )
    return OneServer(config, log)


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """Restore structlog's configuration after each test: commands configure it for the whole process, which goes on
    with other tests."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Return the folder of converted models, which is kept between runs."""
    return Path(os.environ.get("LORALANE_TEST_DATA", Path.home() / ".cache" / "loralane-test"))


@pytest.fixture(scope="session")
def smollm2(data_dir) -> Path:
    """Return the folder of SmolLM2-135M-Instruct as bf16 safetensors with its tokenizer."""
    from lab.demo.dense import dense_folder  # imports transformers

    return dense_folder("embedded", data_dir, Console(stderr=True))


@pytest.fixture
def packed_linears():
    """Skip a test of our own bf16 linear kernels where the processor lacks AVX512-BF16, which they need."""
    import torch

    from lora_kernels.cpu.numba_gemm import can_pack

    if not can_pack(torch.empty(2, 2, dtype=torch.bfloat16)):
        pytest.skip("needs AVX512-BF16")
