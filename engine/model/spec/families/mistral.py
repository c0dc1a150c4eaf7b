"""Mistral: Llama with a sliding window in all layers, unless `sliding_window` is null. Mixtral has experts in every
layer, too."""

from __future__ import annotations

from dataclasses import replace

from engine.model.spec.families.base import Json, ModelSpec, read_experts, read_llama

RENAMES = (("mlp", "block_sparse_moe"), ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
"""Names of experts' linears in checkpoints: gate is w1, up is w3 and down is w2."""


def read_mistral(config: Json) -> ModelSpec:
    """Return the spec of a Mistral model from its config.json."""
    spec = read_llama(config)
    return replace(spec, windows=(config.get("sliding_window", 4096),) * spec.layers)


def read_mixtral(config: Json) -> ModelSpec:
    """Return the spec of a Mixtral model from its config.json."""
    spec = read_llama(config)
    windows = (config.get("sliding_window"),) * spec.layers
    return replace(spec, windows=windows, experts=read_experts(config, spec), renames=RENAMES)
