"""Lists every field of PEFT's configurations, by how an adapter that sets the field is treated, and PEFT's kinds of
adapters (`peft_type`): those that are served, and why the others are not."""

from __future__ import annotations

from typing import NamedTuple

LORA, ADALORA, VERA, LOHA, LOKR, IA3 = "LORA", "ADALORA", "VERA", "LOHA", "LOKR", "IA3"

HANDLED = {
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "init_lora_weights", "bias", "base_model_name_or_path", "use_dora",
    "alora_invocation_tokens", "target_parameters", "trainable_token_indices", "modules_to_save",
}  # fmt: skip
HARMLESS = {
    "task_type", "inference_mode", "revision", "auto_mapping", "peft_version", "lora_dropout", "loftq_config",
    "eva_config", "corda_config", "lora_ga_config", "megatron_core", "qalora_group_size", "runtime_config",
    "ensure_weight_tying", "fan_in_fan_out",
}  # fmt: skip
"""Fields for training, bookkeeping or initialisation, which do not affect the forward pass. `fan_in_fan_out` has none
on linears, where PEFT warns and ignores it, and no family here has Conv1D."""

REFUSED = {
    "use_bora": "BoRA adapters are not supported; retrain without it, or merge the adapter into its base",
    "use_qalora": "QA-LoRA adapters are not supported; retrain with use_qalora=false",
    "use_bdlora": "block-diagonal LoRA is not supported; retrain without it",
    "lora_bias": "a bias on lora_B is not supported; retrain with lora_bias=false",
    "modules_to_save": "fully trained modules are not supported in adapters of this kind; retrain without them",
    "megatron_config": "Megatron adapters are not supported; convert it to a plain LoRA",
    "layer_replication": "the adapter is of a base with replicated layers, which this model is not",
    "arrow_config": "Arrow routing is not supported; serve each of its adapters by its own name",
    "kasa_config": "KaSA changes the base weights, which every adapter shares; convert it to a plain LoRA",
    "velora_config": "VeLoRA adapters are not supported; save it as a plain LoRA",
    "monteclora_config": "MonteCLoRA adapters are not supported; save it as a plain LoRA",
}
ACTIVE_WHEN_EMPTY = frozenset(("arrow_config", "kasa_config", "use_bdlora"))
"""Fields that PEFT enables for any value except null, empty values included."""
PLAIN_INITIALISATIONS = (None, True, False, "gaussian", "orthogonal", "eva", "mica")
"""Initialisations that leave the base weights as they are, unlike PiSSA, OLoRA, CorDA, LoftQ and others."""
LATEST_PEFT = (0, 21)
"""The latest version of PEFT all of whose fields are known here. A file of a later one may have fields that change the
computation."""


_SELECTION = frozenset(("peft_type", "target_modules", "base_model_name_or_path"))
_LAYERS = frozenset(("layers_to_transform", "layers_pattern"))
_BOOKKEEPING = frozenset(("task_type", "inference_mode", "revision", "auto_mapping", "peft_version", "fan_in_fan_out"))
_LYCORIS = _SELECTION | _LAYERS | {"exclude_modules", "r", "alpha", "rank_pattern", "alpha_pattern"}
_LYCORIS_TRAINING = _BOOKKEEPING | {"rank_dropout", "module_dropout", "use_effective_conv2d", "init_weights"}


class KindFields(NamedTuple):
    """The fields of a kind's configuration that are read (`handled`) or do not matter (`harmless`); PEFT's others are
    in `refused` or `REFUSED`. `rank` and `alpha` name fields, empty if there are none; `default_rank` is PEFT's."""

    handled: frozenset[str]
    harmless: frozenset[str]
    rank: str = ""
    default_rank: int = 1
    alpha: str = ""
    refused: frozenset[str] = frozenset()


KINDS = {
    LORA: KindFields(frozenset(HANDLED), frozenset(HARMLESS), "r", 8, "lora_alpha"),
    ADALORA: KindFields(
        _SELECTION | _LAYERS | {"exclude_modules", "bias", "init_lora_weights", "lora_alpha", "init_r"},
        frozenset(HARMLESS)
        | {"r", "target_r", "tinit", "tfinal", "deltaT", "beta1", "beta2", "orth_reg_weight", "total_step"}
        | {"rank_pattern"},  # which rows of init_r were kept: the tensors have only these
        "init_r",
        12,
        "lora_alpha",
        frozenset(HANDLED)
        - _SELECTION
        - _LAYERS
        - {"exclude_modules", "bias", "init_lora_weights", "lora_alpha"}
        - {"r", "rank_pattern"},
    ),
    VERA: KindFields(
        _SELECTION | _LAYERS | {"bias", "r", "projection_prng_key", "save_projection"},
        _BOOKKEEPING | {"vera_dropout", "d_initial", "init_weights"},
        "r",
        256,
    ),
    LOHA: KindFields(_LYCORIS, _LYCORIS_TRAINING, "r", 8, "alpha"),
    LOKR: KindFields(
        _LYCORIS, _LYCORIS_TRAINING | {"rank_dropout_scale", "decompose_both", "decompose_factor"}, "r", 8, "alpha"
    ),
    IA3: KindFields(_SELECTION | {"exclude_modules", "feedforward_modules"}, _BOOKKEEPING | {"init_ia3_weights"}),
}
"""The kinds of adapters that are served. All but LoRA are converted to it when they are read (peft_kinds)."""

_ROTATES = "it turns whole weights, which no A and B of up to rank 256 do; merge it into its base and serve that model"
_PROMPT = "it puts trained vectors before the prompt and leaves the projections as they are; train a LoRA in its place"
_CONVERTIBLE = "it is not converted here; PEFT's save_as_lora makes a LoRA that is, or comes close to, the same"
_NORMS = "it trains the norms, which every adapter shares; train a LoRA in its place"
_PROMPTS = (
    "PROMPT_TUNING",
    "MULTITASK_PROMPT_TUNING",
    "P_TUNING",
    "PREFIX_TUNING",
    "ADAPTION_PROMPT",
    "CPT",
    "CARTRIDGE",
)
_WITH_SAVE_AS_LORA = (
    *("C3A", "DELORA", "FOURIERFT", "GRALORA", "HIRA", "MISS", "PSOFT"),
    *("RANDLORA", "SHIRA", "TINYLORA", "UNILORA", "VBLORA", "WAVEFT"),
)
OTHER_KINDS = {
    **dict.fromkeys(("OFT", "BOFT", "ROAD"), _ROTATES),
    "HRA": "it is not converted here; merge it into its base and serve that model",
    **dict.fromkeys(_PROMPTS, _PROMPT),
    **dict.fromkeys(_WITH_SAVE_AS_LORA, _CONVERTIBLE),
    "LN_TUNING": _NORMS,
    "TRAINABLE_TOKENS": "it changes no projection; train a LoRA that has trainable_token_indices",
    "XLORA": "it mixes LoRAs anew for each token; serve each of them by its own name",
}
"""Why adapters of other kinds are refused, by their kind."""
