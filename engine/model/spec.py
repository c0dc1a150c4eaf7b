"""Reads from a model folder's config.json what the decoder needs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.model.rope import RopeSpec, read_rope

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shape, rotary embedding and EOS tokens of a Llama-family decoder."""

    model_type: str
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeSpec
    max_position: int
    """Number of positions that the model was made for."""
    windows: tuple[int | None, ...]
    """Sliding attention window of each layer in tokens. None means that a row sees everything before it."""
    tied_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """True means that RMSNorm is applied to each query and key head, before the rotation."""
    eos_token_ids: tuple[int, ...]

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


def read_spec(folder: Path) -> ModelSpec:
    """Reads config.json and, if it exists, generation_config.json of a Hugging Face folder. Raises ValueError if
    `folder` is no such folder, or describes a model that this engine cannot run; the message says why."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json: not a Hugging Face model folder")
    config = json.loads((folder / "config.json").read_text())
    generation_file = folder / "generation_config.json"
    generation = json.loads(generation_file.read_text()) if generation_file.is_file() else {}
    return parse_spec(config, generation)


def parse_spec(config: Json, generation: Json) -> ModelSpec:
    """Builds the spec from the contents of config.json and generation_config.json. Raises ValueError, whose message
    says why, if this engine cannot run the model."""
    _check_supported(config)
    kind = config["model_type"]
    heads = _required(config, "num_attention_heads")
    hidden_size = _required(config, "hidden_size")
    head_dim = config.get("head_dim") or (128 if kind == "qwen3" else hidden_size // heads)
    attention_bias = bool(config.get("attention_bias", False))
    return ModelSpec(
        model_type=kind,
        architecture=(config.get("architectures") or [kind])[0],
        vocab_size=_required(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_required(config, "intermediate_size"),
        layers=_required(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        rope=read_rope(config, head_dim),
        max_position=_required(config, "max_position_embeddings"),
        windows=_windows(config),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=kind == "qwen2" or attention_bias,
        o_bias=kind != "qwen2" and attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=kind == "qwen3",
        eos_token_ids=_token_ids(generation.get("eos_token_id", config.get("eos_token_id"))),
    )


def _check_supported(config: Json) -> None:
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise ValueError(f"model_type {kind!r} is not supported; supported: {', '.join(MODEL_TYPES)}")
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {config['hidden_act']!r} is not supported; supported: silu")


def _required(config: Json, key: str) -> Any:
    if config.get(key) is None:
        raise ValueError(f"config.json has no {key}")
    return config[key]


def _windows(config: Json) -> tuple[int | None, ...]:
    """Returns the window of each layer in tokens, or None for full attention. Llama has none, Mistral one in all layers
    unless `sliding_window` is null, Qwen one if `use_sliding_window` is set, from layer `max_window_layers` on or as
    `layer_types` says."""
    layers = _required(config, "num_hidden_layers")
    if config["model_type"] == "mistral":
        return (config.get("sliding_window", 4096),) * layers
    if config["model_type"] == "llama" or not config.get("use_sliding_window"):
        return (None,) * layers
    kinds = config.get("layer_types") or [
        "sliding_attention" if layer >= config.get("max_window_layers", 28) else "full_attention"
        for layer in range(layers)
    ]
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown or len(kinds) != layers:
        raise ValueError(f"layer_types must name {layers} layers full_attention or sliding_attention, not {kinds}")
    window = config.get("sliding_window", 4096)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
