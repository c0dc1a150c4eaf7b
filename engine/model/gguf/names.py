"""Names of a model's tensors in GGUF files, by those that Hugging Face gives them.

Source: llama.cpp's `gguf-py/gguf/tensor_mapping.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
"""Names of modules in a layer. The last is Mixtral's router."""
NORMS_AROUND = IN_LAYER | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
"""The same for families with norms before and after attention and MLP."""
BY_TYPE: Mapping[str, Mapping[str, str]] = {"gemma2": NORMS_AROUND, "gemma3_text": NORMS_AROUND}
"""Names of modules in a layer by `model_type`, where they are not those of IN_LAYER."""
EXPERT_PARTS = {"w1": "ffn_gate", "w3": "ffn_up", "w2": "ffn_down"}
"""Names of the projections of Mixtral's experts."""
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
GGUF_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
EXPERT = re.compile(r"block_sparse_moe\.experts\.(\d+)\.(w[123])")
GGUF_EXPERT = re.compile(r"(ffn_gate|ffn_up|ffn_down)\.(\d+)")


def gguf_name(name: str, model_type: str = "") -> str:
    """Return the name that GGUF files of a `model_type` give to the tensor that Hugging Face calls `name`, where each
    expert has tensors of its own. Raises KeyError if they have no such tensor."""
    if found := LAYER.fullmatch(name):
        return f"blk.{found[1]}.{_in_layer(found[2], model_type)}.{found[3]}"
    module, _, kind = name.rpartition(".")
    return f"{WHOLE[module]}.{kind}"


def hub_name(name: str, model_type: str = "") -> str:
    """Return Hugging Face's name of a tensor that GGUF files of a `model_type` call `name`, or `name` if it has
    none."""
    if found := GGUF_LAYER.fullmatch(name):
        module = _in_hub_layer(found[2], model_type)
        return f"model.layers.{found[1]}.{module}.{found[3]}" if module else name
    module, _, kind = name.rpartition(".")
    known = _key_of(module, WHOLE)
    return f"{known}.{kind}" if known else name


def _in_layer(module: str, model_type: str) -> str:
    if found := EXPERT.fullmatch(module):
        return f"{EXPERT_PARTS[found[2]]}.{found[1]}"
    return BY_TYPE.get(model_type, IN_LAYER)[module]


def _in_hub_layer(module: str, model_type: str) -> str | None:
    if found := GGUF_EXPERT.fullmatch(module):
        return f"block_sparse_moe.experts.{found[2]}.{_key_of(found[1], EXPERT_PARTS)}"
    return _key_of(module, BY_TYPE.get(model_type, IN_LAYER))


def _key_of(value: str, names: Mapping[str, str]) -> str | None:
    return next((key for key, name in names.items() if name == value), None)
