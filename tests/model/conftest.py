"""A tiny random model, and what makes the modules beside it importable by the tests."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from tiny_llama import save_llama


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory) -> Path:
    """Return the folder of a model with 97 tokens."""
    path = tmp_path_factory.mktemp("model")
    save_llama(path, 97, 128, eos_token_id=[2, 3])
    return path
