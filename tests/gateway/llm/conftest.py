"""A tiny random model with a tokenizer and a chat template, two adapters of it, and an `LLM` of both."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "model"))

VOCABULARY = 260


@pytest.fixture(scope="session")
def tiny_chat(tmp_path_factory):
    """Return the folder of the model, whose tokens are bytes."""
    from fakes import tiny_tokenizer
    from tiny_llama import save_llama

    folder = tmp_path_factory.mktemp("tiny") / "tiny-chat"
    save_llama(folder, VOCABULARY, 512, eos_token_id=0)
    tiny_tokenizer()._template.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_adapter(tmp_path_factory):
    """Return the folder of an adapter, and what it adds to which weight."""
    from tiny_adapters import save_adapter

    folder = tmp_path_factory.mktemp("adapters") / "first"
    return folder, save_adapter(folder, rank=4, seed=1)


@pytest.fixture(scope="session")
def options():
    """Return options of a small engine in fp32."""
    return {"dtype": "float32", "device": "cpu", "engine": {"num_pages": 200, "swap_gb": 0.0, "threads": 1}}
