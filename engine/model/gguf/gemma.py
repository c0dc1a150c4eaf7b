"""What config.json says of Gemma models beyond Llama's, from GGUF metadata. Source: llama.cpp's `llama-model`
(load_hparams) and its graphs of gemma, gemma2 and gemma3, which know some numbers by the model's size."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from engine.model.gguf.header import Value


class GemmaKind(NamedTuple):
    """What an architecture has unless its file says otherwise: no window of `window` tokens on every `pattern`-th layer
    (0: no windows), and caps. Models of `wide_layers` layers divide scores by the width per head."""

    pattern: int
    window: int
    wide_layers: int
    attention_cap: float | None
    logits_cap: float | None


GEMMA_KINDS = {
    "gemma": GemmaKind(0, 0, 0, None, None),
    "gemma2": GemmaKind(2, 4096, 46, 50.0, 30.0),
    "gemma3": GemmaKind(6, 0, 62, None, None),
}
GEMMA_KEYS = {
    "gemma": frozenset[str](),
    "gemma2": frozenset(("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping")),
    "gemma3": frozenset(
        (
            *("attention.sliding_window", "attention.sliding_window_pattern"),
            *("final_logit_softcapping", "rope.freq_base_swa"),
        )
    ),
}
"""Keys of the architectures that are read here."""


class Numbers(Protocol):
    def __call__(self, key: str, default: float | None = None) -> float:
        """Return a number of the architecture, or `default` if the file has none."""


def gemma_config(kind: str, shape: dict[str, Any], number: Numbers, pattern: Value) -> dict[str, Any]:
    """Return what config.json says of a Gemma model beyond `shape`, which it says of every model. `pattern` is the
    file's `attention.sliding_window_pattern`: a number, a flag for each layer, or None."""
    known, layers = GEMMA_KINDS[kind], shape["num_hidden_layers"]
    found: dict[str, Any] = {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}
    if not known.pattern:
        return found
    if not number("attention.sliding_window", known.window):
        raise ValueError(f"{kind}.attention.sliding_window is missing or 0: convert the model again with llama.cpp")
    wide = shape["hidden_size"] // shape["num_attention_heads"]
    found |= {
        "query_pre_attn_scalar": wide if layers == known.wide_layers else shape["head_dim"],
        "sliding_window": int(number("attention.sliding_window", known.window)),
        "layer_types": _layer_types(pattern, known.pattern, layers),
        "attn_logit_softcapping": number("attn_logit_softcapping", known.attention_cap or 0.0) or None,
        "final_logit_softcapping": number("final_logit_softcapping", known.logits_cap or 0.0) or None,
    }
    if kind == "gemma3":
        near = {"rope_type": "default", "rope_theta": number("rope.freq_base_swa", 10_000.0)}
        found["rope_parameters"] = {"full_attention": shape["rope_parameters"], "sliding_attention": near}
    return found


def _layer_types(pattern: Value, default: int, layers: int) -> list[str]:
    if isinstance(pattern, tuple):
        near = [bool(one) for one in pattern]
    else:
        every = pattern if isinstance(pattern, int) and pattern > 0 else default
        near = [(layer + 1) % every != 0 for layer in range(layers)]
    return ["sliding_attention" if one else "full_attention" for one in near]
