"""Granite 3: Llama with factors of embeddings, attention scores, residuals and logits, also with experts in every
layer."""

from __future__ import annotations

from dataclasses import replace

from engine.model.spec.families.base import Json, ModelSpec, Stacks, read_experts, read_llama

BLOCK = "block_sparse_moe"
STACKS = Stacks(f"{BLOCK}.input_linear.weight", f"{BLOCK}.output_linear.weight")
ROUTER = f"{BLOCK}.router.layer"
ALIASES = (
    (f"{BLOCK}.experts.gate_up_proj", STACKS.gate_up),
    (f"{BLOCK}.experts.down_proj", STACKS.down),
    (f"{BLOCK}.router.weight", f"{ROUTER}.weight"),
)
"""Pairs (name in transformers 5, name in transformers 4) of tensors. By default, transformers 5 writes the latter."""


def read_granite(config: Json) -> ModelSpec:
    """Return the spec of a dense Granite model from its config.json."""
    return replace(
        read_llama(config),
        embedding_scale=config.get("embedding_multiplier", 1.0),
        attention_scale=config.get("attention_multiplier", 1.0),
        residual_scale=config.get("residual_multiplier", 1.0),
        logits_divisor=config.get("logits_scaling", 1.0),
    )


def read_granite_moe(config: Json) -> ModelSpec:
    """Return the spec of a Granite model with experts from its config.json."""
    spec = read_granite(config)
    experts = read_experts(config, spec, module=BLOCK, router="router", stacks=STACKS)
    return replace(spec, experts=experts, renames=(("mlp.gate", ROUTER), ("mlp", BLOCK)), aliases=ALIASES)
