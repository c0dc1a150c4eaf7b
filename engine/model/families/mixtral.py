"""Mixtral: Mistral with experts in every layer, which checkpoints name w1 (gate), w3 (up) and w2 (down)."""

from __future__ import annotations

from dataclasses import replace

from engine.model.families.base import Json, ModelSpec, read_experts, read_llama

RENAMES = (("mlp", "block_sparse_moe"), ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))


def read_mixtral(config: Json) -> ModelSpec:
    """Reads a Mixtral model."""
    spec = read_llama(config)
    windows = (config.get("sliding_window"),) * spec.layers
    return replace(spec, windows=windows, experts=read_experts(config, spec), renames=RENAMES)
