"""What several test folders share: the embedded model, prepared once a machine."""

import os

# Before gRPC is imported: its fork handlers abort the child of a test process in which other threads use gRPC, between
# fork and exec, as it did once in a run of CI.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# Before torch is imported: threads of two test processes that spin for long keep each other's cores.
os.environ.setdefault("GOMP_SPINCOUNT", "500")

from pathlib import Path

import pytest
from rich.console import Console
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from engine.model.prepare import prepare_model

SERVERS = ("tests/e2e/", "tests/chaos/")
"""Where tests start whole servers, with patience for one at a time."""
LONGEST = (
    *SERVERS,
    "tests/model/test_parity.py",
    "tests/kernels/test_triton",
    "tests/model/test_graphs.py",
    "tests/fuzz/",
    "tests/core/test_fair_share.py",
)
"""Begun first, so that no process is left alone with one of them at the end. They take a minute or more each."""


class OneServer(LoadFileScheduling):
    """What runs side by side: one file beside another, but never two servers."""

    def _split_scope(self, nodeid: str) -> str:
        return "servers" if nodeid.startswith(SERVERS) else str(super()._split_scope(nodeid))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> OneServer:
    config.option.loadscopereorder = False  # it would begin files of many tests first, which are the quickest
    return OneServer(config, log)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Kept between runs, so that the model is converted once."""
    return Path(os.environ.get("LORALANE_TEST_DATA", Path.home() / ".cache" / "loralane-test"))


@pytest.fixture(scope="session")
def smollm2(data_dir) -> Path:
    """SmolLM2-135M-Instruct as bf16 safetensors with its tokenizer."""
    return prepare_model("embedded", data_dir, Console(stderr=True))


@pytest.fixture
def packed_linears():
    """For tests of linears in bf16 that are kernels of ours, which need a processor with the instruction."""
    import torch

    from lora_kernels.cpu.numba_gemm import can_pack

    if not can_pack(torch.empty(2, 2, dtype=torch.bfloat16)):
        pytest.skip("needs AVX512-BF16")
