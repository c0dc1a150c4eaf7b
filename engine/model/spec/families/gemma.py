"""Gemma 1, 2, and 3 without images: scaled embeddings, norms with weights added to 1, and a GELU. Gemma 2 has more
norms and bounds scores and logits; Gemma 3 has norms of heads and rotary embeddings of windows."""

from __future__ import annotations

from dataclasses import replace

from engine.model.spec.families.base import Json, ModelSpec, NormNames, read_llama, windows_by_type
from engine.model.spec.rope import read_rope

GELU = "gelu_pytorch_tanh"
NORMS = NormNames(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
FULL, SLIDING = "full_attention", "sliding_attention"


def read_gemma(config: Json) -> ModelSpec:
    """Return the spec of a Gemma 1 model from its config.json. Raises ValueError if its activation is not supported."""
    if (found := config.get("hidden_activation") or GELU) != GELU:
        raise ValueError(f"hidden_activation {found!r} is not supported; supported: {GELU}")
    spec = read_llama({"head_dim": 256, "tie_word_embeddings": True, **config, "hidden_act": "silu"})
    return replace(
        spec, activation="gelu", embedding_scale=spec.hidden_size**0.5, wide_norms=True, norm_weight_offset=1.0
    )


def read_gemma2(config: Json) -> ModelSpec:
    """Return the spec of a Gemma 2 model from its config.json."""
    spec, capped = read_gemma(config), {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **config}
    return _since_gemma2(spec, capped, _layer_types(config, spec.layers, 2))


def read_gemma3(config: Json) -> ModelSpec:
    """Return the spec of a Gemma 3 model without images from its config.json."""
    of_type = config.get("rope_parameters") or {}
    of_type = of_type if FULL in of_type else {FULL: of_type}
    full = {"rope_theta": 1e6, **config, "rope_parameters": of_type.get(FULL)}
    local = {"rope_theta": config.get("rope_local_base_freq", 1e4), "rope_parameters": of_type.get(SLIDING)}
    spec = read_gemma(full)
    kinds = _layer_types(config, spec.layers, config.get("sliding_window_pattern", 6))
    near, far = read_rope(local, spec.head_dim), spec.ropes[0]
    ropes = tuple(near if kind == SLIDING else far for kind in kinds)
    return replace(_since_gemma2(spec, config, kinds), qk_norm="head", ropes=ropes)


def _layer_types(config: Json, layers: int, every: int) -> list[str]:
    """Return the kind of attention of each layer of a Gemma model: if config.json does not say, every `every`-th one
    has no window."""
    return config.get("layer_types") or [SLIDING if (layer + 1) % every else FULL for layer in range(layers)]


def _since_gemma2(spec: ModelSpec, config: Json, kinds: list[str]) -> ModelSpec:
    """Return the spec with what Gemma 2 and 3 share: norms, scale and caps of attention, and windows. Raises ValueError
    if config.json asks for rows that see those after them, or for a cap that is not positive."""
    if config.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention is not supported")
    return replace(
        spec,
        norms=NORMS,
        attention_scale=config.get("query_pre_attn_scalar", 256) ** -0.5,
        attention_cap=_cap(config, "attn_logit_softcapping"),
        logits_cap=_cap(config, "final_logit_softcapping"),
        windows=windows_by_type(kinds, config.get("sliding_window", 4096), spec.layers),
    )


def _cap(config: Json, name: str) -> float | None:
    cap = config.get(name)
    if cap is not None and not cap > 0:
        raise ValueError(f"{name} must be positive or null, not {cap!r}")
    return cap
