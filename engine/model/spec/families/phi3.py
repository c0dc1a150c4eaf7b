"""Phi-3 and Phi-4-mini: q, k and v are stored as one projection, gate and up as another, and a part of each head may be
rotated."""

from __future__ import annotations

from dataclasses import replace

from engine.model.spec.families.base import Json, ModelSpec, read_llama


def read_phi3(config: Json) -> ModelSpec:
    """Return the spec of a Phi-3 or Phi-4-mini model from its config.json."""
    spec = read_llama({"rms_norm_eps": 1e-5, **config}, partial_rope=True)
    return replace(spec, windows=(config.get("sliding_window"),) * spec.layers, fused=True)
