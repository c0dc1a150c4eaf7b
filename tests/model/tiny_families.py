"""Random models of two layers, of every family that is served."""

from functools import partial

import torch
import transformers

VOCAB = 97
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "attn_implementation": "eager",
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
YARN = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_theta": 5e5,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3}
Llama, Qwen2, Qwen3 = transformers.LlamaConfig, transformers.Qwen2Config, transformers.Qwen3Config
FAMILIES = {
    "llama": partial(Llama),
    "llama_tied": partial(Llama, tie_word_embeddings=True),
    "llama_biased": partial(Llama, attention_bias=True, mlp_bias=True),
    "llama3_rope": partial(Llama, rope_parameters=LLAMA3),
    "linear_rope": partial(Llama, rope_parameters=LINEAR),
    "yarn_rope": partial(Llama, rope_parameters=YARN),
    "mistral_window": partial(transformers.MistralConfig, sliding_window=9),
    "mistral_full": partial(transformers.MistralConfig, sliding_window=None),
    "qwen2": partial(Qwen2),
    "qwen2_window": partial(Qwen2, use_sliding_window=True, sliding_window=9, max_window_layers=1),
    "qwen3": partial(Qwen3, head_dim=24),
    "smollm3": partial(transformers.SmolLM3Config, no_rope_layers=[0, 1]),
    "smollm3_window": partial(
        transformers.SmolLM3Config, no_rope_layers=[1, 0], use_sliding_window=True, sliding_window=9
    ),
    "granite": partial(
        transformers.GraniteConfig,
        embedding_multiplier=3.0,
        attention_multiplier=0.4,
        residual_multiplier=0.6,
        logits_scaling=2.0,
    ),
    "gemma": partial(transformers.GemmaConfig, head_dim=16, tie_word_embeddings=True, initializer_range=0.05),
    "gemma2": partial(
        transformers.Gemma2Config,
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=9,
        attn_logit_softcapping=0.5,
        final_logit_softcapping=0.7,
        tie_word_embeddings=True,
        initializer_range=0.05,
    ),
    "gemma3": partial(
        transformers.Gemma3TextConfig,
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention"],
        tie_word_embeddings=True,
        initializer_range=0.05,
    ),
    "phi3": partial(
        transformers.Phi3Config,
        head_dim=16,
        sliding_window=9,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
    ),
    "phi3_longrope": partial(
        transformers.Phi3Config,
        max_position_embeddings=512,
        original_max_position_embeddings=128,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.2, 1.5, 1.9, 2.5],
            "long_factor": [2.0, 3.0, 5.0, 7.0, 9.0, 11.0],
            "original_max_position_embeddings": 128,
        },
    ),
    "mixtral": partial(transformers.MixtralConfig, intermediate_size=32, num_local_experts=3, num_experts_per_tok=2),
    "granitemoe": partial(
        transformers.GraniteMoeConfig,
        intermediate_size=32,
        num_local_experts=3,
        num_experts_per_tok=2,
        embedding_multiplier=3.0,
        attention_multiplier=0.4,
        residual_multiplier=0.6,
        logits_scaling=2.0,
    ),
    "gpt_oss": partial(
        transformers.GptOssConfig,
        intermediate_size=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=16,
        sliding_window=9,
        swiglu_limit=1.5,
        rope_parameters={**YARN, "truncate": False},
    ),
    "olmoe": partial(transformers.OlmoeConfig, intermediate_size=32, num_experts=3, num_experts_per_tok=2),
    "qwen2_moe": partial(
        transformers.Qwen2MoeConfig, **EXPERTS, moe_intermediate_size=40, shared_expert_intermediate_size=72
    ),
    "qwen3_moe": partial(
        transformers.Qwen3MoeConfig,
        **EXPERTS,
        moe_intermediate_size=40,
        head_dim=24,
        norm_topk_prob=True,
        mlp_only_layers=[0],
    ),
    "olmo2": partial(transformers.Olmo2Config, num_key_value_heads=2),
}

STACKED = {
    "granitemoe": tuple(
        f"block_sparse_moe.{name}" for name in ("experts.gate_up_proj", "experts.down_proj", "router.weight")
    ),
    "gpt_oss": tuple(f"mlp.{name}" for name in ("experts.gate_up_proj", "experts.down_proj", "router.weight")),
}
"""The parameters of experts that adapters name, where they are not among all linears for PEFT."""


def save_model(family, folder, **special):
    """A random model of the family, saved; biases and norms random too, so that a forgotten one shows."""
    torch.manual_seed(0)
    config = FAMILIES[family](**{**BASE, **FAMILIES[family].keywords, **special})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 or name.endswith("_bias"):
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    model.save_pretrained(folder)
    return model
