"""Mixtral: Mistral with experts in every layer, which checkpoints name w1 (gate), w3 (up) and w2 (down)."""

from __future__ import annotations

from dataclasses import replace

from engine.model.families.base import ExpertsSpec, Json, ModelSpec, read_llama, required

RENAMES = (("mlp", "block_sparse_moe"), ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))


def read_mixtral(config: Json) -> ModelSpec:
    """Reads a Mixtral model."""
    spec = read_llama(config)
    count, top_k = required(config, "num_local_experts"), required(config, "num_experts_per_tok")
    experts = ExpertsSpec(count, top_k, spec.intermediate_size, normalised=True, layers=(True,) * spec.layers)
    return replace(spec, windows=(config.get("sliding_window"),) * spec.layers, experts=experts, renames=RENAMES)
