"""OLMo 2: Llama with norms after attention and MLP in place of those before, and of whole q and k projections. OLMoE:
Llama with experts in every layer, and norms of whole q and k projections."""

from __future__ import annotations

from dataclasses import replace

from engine.model.spec.families.base import ExpertsSpec, Json, ModelSpec, NormNames, read_llama, required

NORMS = NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm")


def read_olmo2(config: Json) -> ModelSpec:
    """Return the spec of an OLMo 2 model from its config.json."""
    with_eps = {"rms_norm_eps": 1e-5, **config}
    return replace(read_llama(with_eps), norms=NORMS, qk_norm="projection", wide_norms=True)


def read_olmoe(config: Json) -> ModelSpec:
    """Return the spec of an OLMoE model from its config.json. Raises ValueError if its queries, keys and values are
    clipped."""
    if config.get("clip_qkv") is not None:
        raise ValueError(f"clip_qkv {config['clip_qkv']!r} is not supported; supported: null")
    spec = read_llama({"rms_norm_eps": 1e-5, **config})
    experts = ExpertsSpec(
        count=config.get("num_local_experts") or required(config, "num_experts"),
        top_k=required(config, "num_experts_per_tok"),
        width=spec.intermediate_size,
        normalised=bool(config.get("norm_topk_prob", False)),
        layers=(True,) * spec.layers,
    )
    return replace(spec, qk_norm="projection", experts=experts)
