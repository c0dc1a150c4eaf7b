"""Qwen 2 and 3: biases of the q, k and v projections or norms of their heads, and windows if `use_sliding_window`.
Both exist with experts, Qwen 2 with an expert beside them that computes all rows."""

from __future__ import annotations

from dataclasses import replace

from engine.model.spec.families.base import ExpertsSpec, Json, ModelSpec, read_llama, required, windows_by_type


def read_qwen2(config: Json) -> ModelSpec:
    """Return the spec of a Qwen 2 or 2.5 model from its config.json."""
    return replace(_with_windows(read_llama(config), config), qkv_bias=True, o_bias=False)


def read_qwen3(config: Json) -> ModelSpec:
    """Return the spec of a dense Qwen 3 model from its config.json."""
    with_dim = {**config, "head_dim": config.get("head_dim") or 128}
    return replace(_with_windows(read_llama(with_dim), config), qk_norm="head")


def read_qwen2_moe(config: Json) -> ModelSpec:
    """Return the spec of a Qwen 2 model with experts from its config.json. Raises ValueError if layers without experts
    are not as wide as the expert that computes all rows."""
    spec = read_qwen2(config)
    experts, shared = _read_experts(config, spec.layers), required(config, "shared_expert_intermediate_size")
    if not all(experts.layers) and shared != spec.intermediate_size:
        raise ValueError(
            f"intermediate_size {spec.intermediate_size} and shared_expert_intermediate_size {shared} must be the same "
            "in a model whose layers do not all have experts"
        )
    return replace(spec, intermediate_size=shared, experts=replace(experts, shared=True))


def read_qwen3_moe(config: Json) -> ModelSpec:
    """Return the spec of a Qwen 3 model with experts from its config.json."""
    spec = read_qwen3(config)
    return replace(spec, experts=_read_experts(config, spec.layers))


def _read_experts(config: Json, layers: int) -> ExpertsSpec:
    """Return the experts' part of a Qwen model's spec. Every `decoder_sparse_step`-th layer has experts, except
    `mlp_only_layers`. Raises ValueError if that number is not positive."""
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    if step < 1:
        raise ValueError(f"decoder_sparse_step must be positive, not {step}")
    return ExpertsSpec(
        count=config.get("num_local_experts") or required(config, "num_experts"),  # transformers 5 writes the former
        top_k=required(config, "num_experts_per_tok"),
        width=required(config, "moe_intermediate_size"),
        normalised=bool(config.get("norm_topk_prob", False)),
        layers=tuple((layer + 1) % step == 0 and layer not in dense for layer in range(layers)),
    )


def _with_windows(spec: ModelSpec, config: Json) -> ModelSpec:
    """Return the spec with the sliding attention windows of config.json: from layer `max_window_layers` on, or as
    `layer_types` says. Without `use_sliding_window` it has none."""
    if not config.get("use_sliding_window"):
        return spec
    first = config.get("max_window_layers", 28)
    kinds = config.get("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(spec.layers)
    ]
    return replace(spec, windows=windows_by_type(kinds, config.get("sliding_window", 4096), spec.layers))
