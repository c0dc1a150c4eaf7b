"""Sizes of dense decoder models, by name or as a model's files say, without reading its weights."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.model.families import find_family
from engine.model.gguf_header import ARCHITECTURES, read_header

CONFIG = "config.json"
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields of config.json that say how many experts a layer has."""
TIED = ("gemma", "gemma2", "gemma3_text", "smollm3")
"""Values of `model_type` whose models have tied embeddings unless config.json says otherwise."""
MOST = (1 << 31) - 1
"""Largest size that is believed."""


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
        return _gguf_shape(path, name) if path.suffix == ".gguf" else _config_shape(path, name)
    except KeyError as error:
        raise ValueError(f"{path} has no {error}: the sizes of this model are not known") from error


def _config_shape(path: Path, name: str) -> Shape:
    """Return the shape that a config.json describes. Raises KeyError, which names the field that it lacks, and
    ValueError if it is not JSON, the engine refuses the family, a size is not a positive integer or the model has
    experts."""
    try:
        config = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} is no JSON object")
    find_family(config.get("model_type"))
    _check_dense(name, [config.get(field) for field in EXPERTS])

    def size(field: str, default: int | None = None) -> int:
        value = config[field] if default is None else config.get(field) or default
        return _positive(value, f"{path}: {field}")

    heads, hidden = size("num_attention_heads"), size("hidden_size")
    return Shape(
        name,
        size("num_hidden_layers"),
        hidden,
        size("intermediate_size"),
        heads,
        size("num_key_value_heads", heads),
        size("head_dim", hidden // heads),
        size("vocab_size"),
        bool(config.get("tie_word_embeddings", config.get("model_type") in TIED)),
        size("max_position_embeddings"),
    )


def _gguf_shape(path: Path, name: str) -> Shape:
    with path.open("rb") as file:
        header = read_header(file, os.fstat(file.fileno()).st_size, str(path))
    kind = header.values["general.architecture"]
    if kind not in ARCHITECTURES.values():
        supported = ", ".join(sorted(set(ARCHITECTURES.values())))
        raise ValueError(f"{path}: {str(kind)[:40]!r} models are not read from GGUF files; supported: {supported}")

    def size(key: str) -> int:
        return _positive(header.values[f"{kind}.{key}"], f"{path}: {kind}.{key}")

    _check_dense(name, [header.values.get(f"{kind}.expert_count")])
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


def _check_dense(name: str, experts: Sequence[Any]) -> None:
    """Raise ValueError if one of the numbers of experts is not 0 or None."""
    if any(experts):
        raise ValueError(f"{name} has experts; only dense models can be planned")


def _positive(value: Any, name: str) -> int:
    if type(value) is not int or not 0 < value <= MOST:
        raise ValueError(f"{name} must be an integer from 1 to {MOST:,}, not {str(value)[:40]}")
    return value
