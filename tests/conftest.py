"""What several test folders share: the embedded model, prepared once a machine."""

import os
from pathlib import Path

import pytest
from rich.console import Console

from engine.model.prepare import prepare_model


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Kept between runs, so that the model is converted once."""
    return Path(os.environ.get("LORALANE_TEST_DATA", Path.home() / ".cache" / "loralane-test"))


@pytest.fixture(scope="session")
def smollm2(data_dir) -> Path:
    """SmolLM2-135M-Instruct as bf16 safetensors with its tokenizer."""
    return prepare_model("embedded", data_dir, Console(stderr=True))
