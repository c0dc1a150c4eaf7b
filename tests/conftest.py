"""What several test folders share: the embedded model, prepared once a machine."""

import os
from pathlib import Path

import pytest
from rich.console import Console

from engine.model.prepare import prepare_model

SERVERS = ("e2e", "chaos")
"""Folders whose tests start whole servers, with patience for one at a time."""


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What runs side by side: one file beside another, but never two servers."""
    for item in items:
        is_server = not set(SERVERS).isdisjoint(item.path.parts)
        item.add_marker(pytest.mark.xdist_group("servers" if is_server else str(item.path)))


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Kept between runs, so that the model is converted once."""
    return Path(os.environ.get("LORALANE_TEST_DATA", Path.home() / ".cache" / "loralane-test"))


@pytest.fixture(scope="session")
def smollm2(data_dir) -> Path:
    """SmolLM2-135M-Instruct as bf16 safetensors with its tokenizer."""
    return prepare_model("embedded", data_dir, Console(stderr=True))
