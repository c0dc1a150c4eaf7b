"""Identifies a model that an engine has loaded, across restarts and machines."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.process.model_source import GGUF_NAME, gguf_parts

if TYPE_CHECKING:
    from engine.model.memory.arena import PageShape

HASHED_BYTES, HASHED_PLACES = 1 << 16, 5
"""Size in bytes of a sample of a file, and number of evenly spaced samples of each file that `hash_model` reads."""


def hash_model(config: EngineConfig) -> str:
    """Return a hash (32 hex digits) of the names, sizes and samples of a model's config.json and weights, and of how
    the engine loads them: equal across restarts, and different for different weights."""
    digest = hashlib.sha256(f"{config.load_format}:{config.seed}:{config.weights}".encode())
    folder = Path(config.model)
    parts, link = list(folder.glob("*.gguf")), folder / GGUF_NAME
    if link.exists():
        parts += gguf_parts(link)[1:]
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors"), *parts]):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            for place in range(HASHED_PLACES):
                file.seek(max(0, size - HASHED_BYTES) * place // (HASHED_PLACES - 1))
                digest.update(file.read(HASHED_BYTES))
    return digest.hexdigest()[:32]


def kv_identity(model_hash: str, dtype: str, shape: PageShape, scaled_for: int, *, fp8_adapters: bool) -> str:
    """Return a hash (32 hex digits) of the model, the shape and dtype of pages, and the rest that equal prefix keys
    need to mean equal pages. `scaled_for` is the length for which FP8 scales were found."""
    parts = model_hash, dtype, *astuple(shape), scaled_for * shape.fp8_kv, fp8_adapters, sys.byteorder
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
