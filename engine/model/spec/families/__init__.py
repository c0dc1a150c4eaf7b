"""The families of models that are served: a function for each `model_type` of config.json that reads how it differs
from Llama. The decoder computes what the resulting `ModelSpec` says, and never asks for a family's name."""

from __future__ import annotations

from collections.abc import Callable

from engine.model.spec.families.base import Json, ModelSpec, read_llama
from engine.model.spec.families.gemma import read_gemma, read_gemma2, read_gemma3
from engine.model.spec.families.gpt_oss import read_gpt_oss
from engine.model.spec.families.granite import read_granite, read_granite_moe
from engine.model.spec.families.mistral import read_mistral, read_mixtral
from engine.model.spec.families.olmo import read_olmo2, read_olmoe
from engine.model.spec.families.phi3 import read_phi3
from engine.model.spec.families.qwen import read_qwen2, read_qwen2_moe, read_qwen3, read_qwen3_moe
from engine.model.spec.families.smollm3 import read_smollm3

FAMILIES: dict[str, Callable[[Json], ModelSpec]] = {
    "gemma": read_gemma,
    "gemma2": read_gemma2,
    "gemma3_text": read_gemma3,
    "gpt_oss": read_gpt_oss,
    "granite": read_granite,
    "granitemoe": read_granite_moe,
    "llama": read_llama,
    "mistral": read_mistral,
    "mixtral": read_mixtral,
    "olmo2": read_olmo2,
    "olmoe": read_olmoe,
    "phi3": read_phi3,
    "qwen2": read_qwen2,
    "qwen2_moe": read_qwen2_moe,
    "qwen3": read_qwen3,
    "qwen3_moe": read_qwen3_moe,
    "smollm3": read_smollm3,
}
EXPERTS = "layers with experts (MoE)"
MISSING = {
    "deepseek_v2": f"{EXPERTS} and multi-head latent attention",
    "deepseek_v3": f"{EXPERTS} and multi-head latent attention",
    "gemma3": "images (use a checkpoint of gemma3_text)",
    "granitemoeshared": "an MLP beside experts that is added whole, with gate and up stored as one",
    "llama4": f"images and {EXPERTS}",
    "phimoe": EXPERTS,
    "qwen3_next": f"{EXPERTS} and linear attention",
}
"""What the engine lacks for well-known families that it refuses, by `model_type`."""


def find_family(kind: object) -> Callable[[Json], ModelSpec]:
    """Return the function that makes a `ModelSpec` of the config.json of models of a `model_type`. Raises ValueError,
    which says what is missing where that is known, if the family is not supported."""
    if isinstance(kind, str) and kind in FAMILIES:
        return FAMILIES[kind]
    lacks = f": the engine lacks {MISSING[kind]}" if isinstance(kind, str) and kind in MISSING else ""
    raise ValueError(f"model_type {kind!r} is not supported{lacks}; supported: {', '.join(FAMILIES)}")
