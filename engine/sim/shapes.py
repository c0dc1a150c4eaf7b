"""Sizes of dense decoder models, by name or as a model's files say, without reading its weights."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.model.gguf_header import read_header

CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a decoder with grouped-query attention and a gated feed-forward block in every layer."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    is_tied: bool
    """True means that the output head is the input embedding."""
    max_position: int

    @property
    def linear_weights(self) -> int:
        """Weights of all layers' matrices."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_weights(self) -> int:
        return self.vocab * self.hidden

    @property
    def weights(self) -> int:
        """All weights of matrices, each in memory once."""
        return self.linear_weights + self.head_weights * (1 if self.is_tied else 2)

    @property
    def lora_widths(self) -> int:
        """Inputs and outputs of the seven projections of all layers: weights of an adapter of rank 1 on all of them."""
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * self.hidden + 2 * query + 2 * (self.hidden + kv)
        return self.layers * (attention + 3 * (self.hidden + self.intermediate))

    def kv_bytes(self, itemsize: int) -> int:
        """Return the bytes of KV of a token whose numbers have `itemsize` bytes each."""
        return 2 * self.kv_heads * self.head_dim * self.layers * itemsize


SHAPES: Mapping[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape("smollm2-135m", 30, 576, 1536, 9, 3, 64, 49_152, True, 8192),
        Shape("llama-3.2-1b", 16, 2048, 8192, 32, 8, 64, 128_256, True, 131_072),
        Shape("llama-3.2-3b", 28, 3072, 8192, 24, 8, 128, 128_256, True, 131_072),
        Shape("llama-3.1-8b", 32, 4096, 14_336, 32, 8, 128, 128_256, False, 131_072),
        Shape("llama-3.1-70b", 80, 8192, 28_672, 64, 8, 128, 128_256, False, 131_072),
        Shape("mistral-7b", 32, 4096, 14_336, 32, 8, 128, 32_768, False, 32_768),
        Shape("qwen2.5-7b", 28, 3584, 18_944, 28, 4, 128, 152_064, False, 32_768),
        Shape("qwen2.5-32b", 64, 5120, 27_648, 40, 8, 128, 152_064, False, 32_768),
        Shape("qwen2.5-72b", 80, 8192, 29_568, 64, 8, 128, 152_064, False, 32_768),
        Shape("qwen3-8b", 36, 4096, 12_288, 32, 8, 128, 151_936, False, 40_960),
    )
}
"""Shapes by name, from the models' own config.json."""


def find_shape(model: str) -> Shape:
    """Return the shape of a model: one of `SHAPES` by name, or that of a Hugging Face folder, a config.json or a GGUF
    file. Raises ValueError if there is no such model or its files do not say its sizes, and OSError if they cannot be
    read."""
    if model in SHAPES:
        return SHAPES[model]
    path = Path(model)
    if path.is_dir():
        path = path / CONFIG
    if not path.is_file():
        raise ValueError(
            f"no model {model!r}: name a folder with a config.json, a GGUF file, or one of {', '.join(SHAPES)}"
        )
    name = path.parent.name if path.name == CONFIG else path.stem
    try:
        return _gguf_shape(path, name) if path.suffix == ".gguf" else _shape(name, json.loads(path.read_text()))
    except KeyError as error:
        raise ValueError(f"{path} has no {error}: the sizes of this model are not known") from error


def _shape(name: str, config: Mapping[str, Any]) -> Shape:
    """Return the shape that a config.json describes. Raises KeyError, which names the field that it lacks, and
    ValueError if the model has experts."""
    if config.get("num_experts") or config.get("num_local_experts"):
        raise ValueError(f"{name} has experts; only dense models can be planned")
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    return Shape(
        name,
        config["num_hidden_layers"],
        hidden,
        config["intermediate_size"],
        heads,
        config.get("num_key_value_heads") or heads,
        config.get("head_dim") or hidden // heads,
        config["vocab_size"],
        bool(config.get("tie_word_embeddings", False)),
        config["max_position_embeddings"],
    )


def _gguf_shape(path: Path, name: str) -> Shape:
    with path.open("rb") as file:
        header = read_header(file, os.fstat(file.fileno()).st_size, str(path))
    kind = header.values["general.architecture"]

    def size(key: str) -> int:
        value = header.values[f"{kind}.{key}"]
        if not isinstance(value, int):
            raise ValueError(f"{path}: {kind}.{key} is {value!r}, not a number")
        return value

    heads, hidden = size("attention.head_count"), size("embedding_length")
    has_dim, is_tied = f"{kind}.attention.key_length" in header.values, "output.weight" not in header.tensors
    return Shape(
        name,
        size("block_count"),
        hidden,
        size("feed_forward_length"),
        heads,
        size("attention.head_count_kv"),
        size("attention.key_length") if has_dim else hidden // heads,
        header.tensors["token_embd.weight"].shape[0],
        is_tied,
        size("context_length"),
    )
