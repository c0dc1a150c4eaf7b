"""Qwen 2 and 3: biases of the q, k and v projections or norms of their heads, and windows if `use_sliding_window`."""

from __future__ import annotations

from dataclasses import replace

from engine.model.families.base import Json, ModelSpec, read_llama, windows_by_type


def read_qwen2(config: Json) -> ModelSpec:
    """Reads a Qwen 2 or 2.5 model."""
    return replace(_with_windows(read_llama(config), config), qkv_bias=True, o_bias=False)


def read_qwen3(config: Json) -> ModelSpec:
    """Reads a dense Qwen 3 model."""
    with_dim = {**config, "head_dim": config.get("head_dim") or 128}
    return replace(_with_windows(read_llama(with_dim), config), qk_norm="head")


def _with_windows(spec: ModelSpec, config: Json) -> ModelSpec:
    """Returns the spec with windows from layer `max_window_layers` on, or as `layer_types` says."""
    if not config.get("use_sliding_window"):
        return spec
    first = config.get("max_window_layers", 28)
    kinds = config.get("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(spec.layers)
    ]
    return replace(spec, windows=windows_by_type(kinds, config.get("sliding_window", 4096), spec.layers))
