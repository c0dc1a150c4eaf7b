"""OLMo 2: norms after attention and MLP in place of those before, and of whole q and k projections."""

from __future__ import annotations

from dataclasses import replace

from engine.model.families.base import Json, ModelSpec, NormNames, read_llama

NORMS = NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm")


def read_olmo2(config: Json) -> ModelSpec:
    """Reads an OLMo 2 model."""
    with_eps = {"rms_norm_eps": 1e-5, **config}
    return replace(read_llama(with_eps), norms=NORMS, qk_norm="projection", wide_norms=True)
