"""Base models and adapters so small that four engines compute them on two cores, in fp32, with a byte's tokenizer."""

from __future__ import annotations

from pathlib import Path

from fakes import tiny_tokenizer

from engine.config import EngineConfig
from gateway.config.models import EnginesConfig, ModelConfig, ModelSettings
from tests.model.tiny_adapters import save_adapter
from tests.model.tiny_llama import save_llama

RANKS = (4, 8, 16)


def tiny_model(folder: Path, name: str, adapters: int, *, seed: int) -> ModelSettings:
    """Save a random model, its tokenizer and `adapters` random adapters below `folder`; return the settings of a model
    `name` that has them all. The weights of another seed are others, and so are the ids of its tokens."""
    source = folder / name
    tokenizer = tiny_tokenizer(reverse=bool(seed % 2))
    save_llama(source, len(tokenizer._template), 1024, seed=seed, eos_token_id=0, bos_token_id=None)
    tokenizer._template.save_pretrained(source)
    preload = {f"{name}-{number}": folder / f"{name}-{number}" for number in range(adapters)}
    for number, path in enumerate(preload.values()):
        save_adapter(path, RANKS[number % len(RANKS)], seed=1000 * seed + number)
    engine = EngineConfig(
        model="", device="cpu", dtype="float32", threads=1, num_pages=2000, max_model_len=1000, host_adapter_gb=0.1
    )
    return ModelSettings(ModelConfig(str(source), name), engine, EnginesConfig(replicas=2), preload=preload)
