"""Mistral: Llama with a sliding window in all layers, unless `sliding_window` is null."""

from __future__ import annotations

from dataclasses import replace

from engine.model.families.base import Json, ModelSpec, read_llama


def read_mistral(config: Json) -> ModelSpec:
    """Reads a Mistral model."""
    spec = read_llama(config)
    return replace(spec, windows=(config.get("sliding_window", 4096),) * spec.layers)
