"""Lists every field of PEFT's LoraConfig, by how an adapter that sets the field is treated."""

from __future__ import annotations

HANDLED = {
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "init_lora_weights", "bias", "base_model_name_or_path", "use_dora",
    "alora_invocation_tokens",
}  # fmt: skip
HARMLESS = {
    "task_type", "inference_mode", "revision", "auto_mapping", "peft_version", "lora_dropout", "loftq_config",
    "eva_config", "corda_config", "lora_ga_config", "megatron_core", "qalora_group_size", "runtime_config",
    "ensure_weight_tying",
}  # fmt: skip
"""Fields for training, bookkeeping or initialisation, which do not affect the forward pass."""

REFUSED = {
    "use_bora": "BoRA adapters are not supported; retrain without it, or merge the adapter into its base",
    "use_qalora": "QA-LoRA adapters are not supported; retrain with use_qalora=false",
    "use_bdlora": "block-diagonal LoRA is not supported; retrain without it",
    "lora_bias": "a bias on lora_B is not supported; retrain with lora_bias=false",
    "fan_in_fan_out": "transposed (Conv1D) weights are not supported; the adapter is of another kind of base model",
    "modules_to_save": "fully trained modules (embeddings, lm_head, norms) are not supported; retrain without them",
    "trainable_token_indices": "trained token embeddings are not supported; retrain without them",
    "target_parameters": "LoRA on bare parameters is not supported; target the projections by target_modules",
    "megatron_config": "Megatron adapters are not supported; convert it to a plain LoRA",
    "layer_replication": "the adapter is of a base with replicated layers, which this model is not",
    "arrow_config": "Arrow routing is not supported; serve each of its adapters by its own name",
    "kasa_config": "KaSA changes the base weights, which every adapter shares; convert it to a plain LoRA",
    "velora_config": "VeLoRA adapters are not supported; save it as a plain LoRA",
    "monteclora_config": "MonteCLoRA adapters are not supported; save it as a plain LoRA",
}
ACTIVE_WHEN_EMPTY = frozenset(("arrow_config", "kasa_config", "use_bdlora"))
"""Fields that PEFT enables for any value except null, empty values included."""
PLAIN_INITIALISATIONS = (None, True, False, "gaussian", "orthogonal", "eva")
"""Initialisations that leave the base weights as they are, unlike PiSSA, OLoRA, CorDA, LoftQ and others."""
