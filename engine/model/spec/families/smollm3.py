"""SmolLM 3: Llama without a rotary embedding in some layers, by default in every fourth, and with tied embeddings."""

from __future__ import annotations

from dataclasses import replace

from engine.model.spec.families.base import Json, ModelSpec, read_llama, windows_by_type
from engine.model.spec.rope import no_rope


def read_smollm3(config: Json) -> ModelSpec:
    """Return the spec of a SmolLM 3 model from its config.json. Raises ValueError if `no_rope_layers` does not have a
    number for each layer."""
    spec, every = read_llama({"tie_word_embeddings": True, **config}), config.get("no_rope_layer_interval", 4)
    rotates = config.get("no_rope_layers") or [(layer + 1) % every != 0 for layer in range(spec.layers)]
    if len(rotates) < spec.layers:
        raise ValueError(f"no_rope_layers has {len(rotates)} numbers for {spec.layers} layers")
    still = no_rope(spec.head_dim)
    ropes = tuple(rope if turns else still for rope, turns in zip(spec.ropes, rotates, strict=False))
    if not config.get("use_sliding_window"):
        return replace(spec, ropes=ropes)
    kinds = config.get("layer_types") or [
        "full_attention" if turns else "sliding_attention" for turns in rotates[: spec.layers]
    ]
    return replace(spec, ropes=ropes, windows=windows_by_type(kinds, config.get("sliding_window"), spec.layers))
