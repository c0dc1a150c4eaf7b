"""A tiny base model with biases, adapter folders saved by PEFT itself, and the ways of training one that are served."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from pathlib import Path

import torch
from peft import AdaLoraConfig, IA3Config, LoHaConfig, LoKrConfig, LoraConfig, PeftConfig, VeraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
VOCAB = 64


def base_model(tied: bool = False) -> LlamaForCausalLM:
    """Weights so large that what attention reads decides which token follows; no bias is 0. A copy of its own, which
    PEFT may change."""
    model = deepcopy(_made(tied))
    torch.manual_seed(0)  # for what PEFT draws next
    return model


@cache
def _made(tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCAB,
        max_position_embeddings=128,
        initializer_range=0.2,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    return model


def save_adapter(
    folder: Path,
    seed: int = 1,
    dtype: torch.dtype = torch.float32,
    size: float = 1.0,
    kind: type[PeftConfig] = LoraConfig,
    tied: bool = False,
    **options,
) -> None:
    """An adapter of random numbers; `size` is their standard deviation. Magnitudes of DoRA and factors of (IA)³ are
    changed by half."""
    defaults = {"r": 4, "target_modules": ["q_proj", "v_proj"]} if kind is LoraConfig else {}
    model = get_peft_model(base_model(tied), kind(**{**defaults, **options}))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator)
            is_factor = "lora_magnitude" in name or "ia3_l" in name
            parameter.data = (parameter.data * (1 + 0.5 * noise) if is_factor else noise * size).to(dtype)
    model.save_pretrained(str(folder))


VARIANTS = {
    "two projections": {},
    "all projections": {"target_modules": list(TARGETS)},
    "alpha": {"lora_alpha": 37},
    "one": {"r": 1, "target_modules": ["down_proj"]},
    "largest rank": {"r": 256, "target_modules": ["k_proj"]},
    "rslora": {"use_rslora": True, "lora_alpha": 5},
    "all-linear": {"target_modules": "all-linear"},
    "expression": {"target_modules": r"model\.layers\.[02]\.(self_attn\.[qk]|mlp\.up)_proj"},
    "full names": {"target_modules": ["model.layers.1.self_attn.q_proj", "self_attn.o_proj"]},
    "name of nothing": {"target_modules": ["q_proj", "W_pack", "proj"]},
    "rank pattern": {"rank_pattern": {"q_proj": 7, "layers.1.self_attn.v_proj": 2}},
    "first rank pattern": {"rank_pattern": {"layers.1.*": 3, "layers.[12].*": 9, "q_proj": 5}},
    "anchored rank pattern": {"rank_pattern": {"^model.layers.2.self_attn.q_proj": 6, "attn.v_proj": 1, "_proj": 2}},
    "alpha pattern": {"alpha_pattern": {r".*\.0\.self_attn\.(q|v)_proj": 64, "v_proj": 1}},
    "patterns and rslora": {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"v_proj": 11}, "use_rslora": True},
    "one layer": {"layers_to_transform": 1},
    "layers": {"layers_to_transform": [0, 2], "layers_pattern": "layers"},
    "layers of lists": {"layers_to_transform": [2], "layers_pattern": ["blocks", "layers"]},
    "layers and a full name": {
        "target_modules": ["q_proj", "model.layers.0.self_attn.k_proj"],
        "layers_to_transform": [1],
    },
    "excluded names": {"target_modules": list(TARGETS), "exclude_modules": ["k_proj", "layers.1.mlp.up_proj"]},
    "excluded expression": {"target_modules": "all-linear", "exclude_modules": r".*\.mlp\..*"},
    "gaussian": {"init_lora_weights": "gaussian"},
    "minor components": {"init_lora_weights": "mica"},
    "bf16": {"dtype": torch.bfloat16},
    "fp16": {"dtype": torch.float16},
}
DORA = {
    "dora": {"use_dora": True},
    "dora everywhere": {"use_dora": True, "target_modules": list(TARGETS), "lora_alpha": 3},
    "dora, rslora, patterns": {
        "use_dora": True,
        "use_rslora": True,
        "target_modules": ["o_proj", "down_proj"],
        "rank_pattern": {"o_proj": 3},
        "alpha_pattern": {"layers.1.mlp.down_proj": 20},
        "layers_to_transform": [1, 2],
    },
    "dora in bf16": {"use_dora": True, "dtype": torch.bfloat16, "target_modules": ["gate_proj", "k_proj"]},
}
CONVERTED = {
    "adalora": {
        "kind": AdaLoraConfig,
        "init_r": 6,
        "lora_alpha": 9,
        "total_step": 10,
        "target_modules": ["q_proj", "down_proj"],
        "rank_pattern": {
            "model.layers.0.self_attn.q_proj.lora_E": [True, False, True, True, False, True],
            "model.layers.1.mlp.down_proj.lora_E": [False] * 6,
        },
    },
    "vera": {"kind": VeraConfig, "r": 40, "target_modules": list(TARGETS), "dtype": torch.bfloat16},
    "vera of a seed": {
        "kind": VeraConfig,
        "r": 24,
        "target_modules": ["k_proj", "down_proj"],
        "save_projection": False,
        "projection_prng_key": 7,
        "layers_to_transform": [0, 2],
    },
    "loha": {
        "kind": LoHaConfig,
        "r": 3,
        "alpha": 5,
        "target_modules": list(TARGETS),
        "rank_pattern": {"q_proj": 16},
        "alpha_pattern": {"layers.1.self_attn.v_proj": 2},
    },
    "lokr": {"kind": LoKrConfig, "r": 2, "alpha": 3, "target_modules": list(TARGETS), "rank_pattern": {"o_proj": 30}},
    "lokr of both": {
        "kind": LoKrConfig,
        "r": 1,
        "decompose_both": True,
        "decompose_factor": 4,
        "target_modules": "all-linear",
    },
    "ia3": {
        "kind": IA3Config,
        "target_modules": ["k_proj", "v_proj", "down_proj"],
        "feedforward_modules": ["down_proj"],
    },
    "ia3 twice": {
        "kind": IA3Config,
        "target_modules": r".*layers\.[02]\..*(q|o|up|down)_proj",
        "feedforward_modules": r".*down_proj",
    },
}
"""Kinds other than LoRA, which are converted to it."""
