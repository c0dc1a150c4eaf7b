"""gpt-oss: Llama with experts in every layer, sinks, and windows in every other layer. All its linears but the head
have biases, and gate and up are bounded."""

from __future__ import annotations

from dataclasses import replace

from engine.model.spec.families.base import Json, ModelSpec, Stacks, read_experts, read_llama, windows_by_type
from lora_kernels.pointwise import BoundedSwiglu

STACKS = Stacks("mlp.experts.gate_up_proj", "mlp.experts.down_proj", interleaved=True, transposed=True)
ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
DEFAULTS = {"head_dim": 64, "attention_bias": True, "rms_norm_eps": 1e-5, "rope_theta": 150_000.0}


def read_gpt_oss(config: Json) -> ModelSpec:
    """Return the spec of a gpt-oss model from its config.json."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or ROPE
    spec = read_llama({**DEFAULTS, **config, "rope_parameters": rope})
    kinds = config.get("layer_types") or [
        "full_attention" if layer % 2 else "sliding_attention" for layer in range(spec.layers)
    ]
    return replace(
        spec,
        windows=windows_by_type(kinds, config.get("sliding_window", 128), spec.layers),
        sinks=True,
        wide_norms=True,
        activation=BoundedSwiglu(config.get("swiglu_limit", 7.0), config.get("swiglu_alpha", 1.702)),
        experts=read_experts(config, spec, biased=True, router="router", stacks=STACKS),
        renames=(("mlp.gate", "mlp.router"),),
    )
