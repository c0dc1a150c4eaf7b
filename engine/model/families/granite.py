"""Granite 3: Llama with factors of embeddings, attention scores, residuals and logits."""

from __future__ import annotations

from dataclasses import replace

from engine.model.families.base import Json, ModelSpec, read_llama


def read_granite(config: Json) -> ModelSpec:
    """Reads a dense Granite model."""
    return replace(
        read_llama(config),
        embedding_scale=config.get("embedding_multiplier", 1.0),
        attention_scale=config.get("attention_multiplier", 1.0),
        residual_scale=config.get("residual_multiplier", 1.0),
        logits_divisor=config.get("logits_scaling", 1.0),
    )
