"""Gemma 1 and Gemma 3 without images: scaled embeddings, norms with weights added to 1, and a GELU in the MLP. Gemma 3
has norms before and after attention and MLP and of heads, and windows and a rotary embedding of their own in most
layers."""

from __future__ import annotations

from dataclasses import replace

from engine.model.families.base import Json, ModelSpec, NormNames, read_llama, windows_by_type
from engine.model.rope import read_rope

GELU = "gelu_pytorch_tanh"
NORMS = NormNames(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
REFUSED = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")
FULL, SLIDING = "full_attention", "sliding_attention"


def read_gemma(config: Json) -> ModelSpec:
    """Reads a Gemma 1 model."""
    if (found := config.get("hidden_activation") or GELU) != GELU:
        raise ValueError(f"hidden_activation {found!r} is not supported; supported: {GELU}")
    spec = read_llama({"head_dim": 256, "tie_word_embeddings": True, **config, "hidden_act": "silu"})
    return replace(
        spec, activation="gelu", embedding_scale=spec.hidden_size**0.5, wide_norms=True, norm_weight_offset=1.0
    )


def read_gemma3(config: Json) -> ModelSpec:
    """Reads a Gemma 3 model without images."""
    for name in REFUSED:
        if config.get(name):
            raise ValueError(f"{name} {config[name]!r} is not supported")
    of_type = config.get("rope_parameters") or {}
    of_type = of_type if FULL in of_type else {FULL: of_type}
    full = {"rope_theta": 1e6, **config, "rope_parameters": of_type.get(FULL)}
    local = {"rope_theta": config.get("rope_local_base_freq", 1e4), "rope_parameters": of_type.get(SLIDING)}
    spec = read_gemma(full)
    every = config.get("sliding_window_pattern", 6)
    kinds = config.get("layer_types") or [SLIDING if (layer + 1) % every else FULL for layer in range(spec.layers)]
    near, far = read_rope(local, spec.head_dim), spec.ropes[0]
    return replace(
        spec,
        norms=NORMS,
        qk_norm="head",
        attention_scale=config.get("query_pre_attn_scalar", 256) ** -0.5,
        windows=windows_by_type(kinds, config.get("sliding_window", 4096), spec.layers),
        ropes=tuple(near if kind == SLIDING else far for kind in kinds),
    )
