"""Reads what config.json says of a model from its GGUF file. Unknown keys that would change results are refused.
Sources: docs/gguf.md of ggml; llama.cpp's `llama-hparams` and `ggml_rope_ext`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from engine.model.gguf.gemma import GEMMA_KEYS, gemma_config
from engine.model.gguf.header import Header, StoredTensor, Value, read_model

ROPE_FACTORS = "rope_freqs.weight"
"""Tensor with a divisor for each rotary frequency: how files of Llama 3.1 and later have their scaling."""
F32 = 0
"""Number of fp32 among ggml's types."""
KINDS = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma": ("gemma", "GemmaForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
"""`model_type` and class of config.json, by llama.cpp's name of the architecture."""
MIXTRAL = ("mixtral", "MixtralForCausalLM")
"""The same of a model of the architecture `llama` that has experts."""
SHAPE = frozenset(
    (
        *("context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size"),
        *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
        *("attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base", "rope.scale_linear"),
        *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
        *("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor"),
        *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
    )
)
"""Keys of an architecture that are read."""
HARMLESS = frozenset(("rope.scaling.finetuned", "tensor_data_layout", "pooling_type"))
"""Keys of an architecture that change no logits."""
EXPERTS = frozenset(("expert_count", "expert_used_count"))
"""Keys of a `llama` with experts that are read."""
NEUTRAL: Mapping[str, frozenset[object]] = {
    "expert_shared_count": frozenset((0,)),
    "expert_group_count": frozenset((0, 1)),
    "expert_group_used_count": frozenset((0, 1)),
    "expert_gating_func": frozenset((0, 1)),
    "expert_weights_norm": frozenset((True,)),
    "expert_weights_scale": frozenset((0.0, 1.0)),
    "attention.causal": frozenset((True,)),
    "use_parallel_residual": frozenset((False,)),
    "expert_count": frozenset((0,)),
    "expert_used_count": frozenset((0,)),
    "attention.clamp_kqv": frozenset((0.0,)),
    "attention.max_alibi_bias": frozenset((0.0,)),
    "logit_scale": frozenset((0.0, 1.0)),
    "residual_scale": frozenset((0.0, 1.0)),
    "embedding_scale": frozenset((0.0, 1.0)),
    "attention.scale": frozenset((0.0,)),
}
"""Keys of an architecture that change results unless they have one of these values."""


def read_config(path: Path) -> dict[str, Any]:
    """Return what config.json says of the model in a GGUF file. Raises ValueError, which names the file and the key, if
    it is damaged, of another architecture than those of KINDS, or not understood."""
    header = read_model(path)
    try:
        return _Metadata(header, path).config()
    except KeyError as error:
        raise ValueError(f"{path.name} has no metadata {error.args[0]}") from error


class _Metadata:
    """The metadata of a GGUF file. Methods raise KeyError for a key that is missing, ValueError for one that is not
    understood."""

    def __init__(self, header: Header, path: Path) -> None:
        self._values, self._tensors, self._path = header.values, header.tensors, path
        self._kind = str(header.values["general.architecture"])

    def config(self) -> dict[str, Any]:
        if self._kind not in KINDS:
            supported = ", ".join(KINDS)
            raise ValueError(
                f"{self._path.name} is of architecture {self._kind!r}, and GGUF files are read of {supported}; use the "
                "model's Hugging Face folder"
            )
        has_experts = self._kind == "llama" and bool(self._get("expert_count"))
        self._check_keys(GEMMA_KEYS.get(self._kind, EXPERTS if has_experts else frozenset()))
        model_type, architecture = MIXTRAL if has_experts else KINDS[self._kind]
        heads, head_dim = int(self._number("attention.head_count")), self._head_dim()
        vocabulary = self._tensors.get("token_embd.weight")
        if vocabulary is None:
            raise ValueError(f"{self._path.name} has no tensor token_embd.weight")
        found = {
            "architectures": [architecture],
            "model_type": model_type,
            "vocab_size": vocabulary.shape[0],
            "hidden_size": int(self._number("embedding_length")),
            "intermediate_size": int(self._number("feed_forward_length")),
            "num_hidden_layers": int(self._number("block_count")),
            "num_attention_heads": heads,
            "num_key_value_heads": int(self._number("attention.head_count_kv", heads)),
            "head_dim": head_dim,
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": int(self._number("context_length")),
            "rope_parameters": self._rope(head_dim),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_bias": "blk.0.attn_output.bias" in self._tensors,
            "hidden_act": "silu",
            **self._special_tokens(),
        }
        if self._kind in GEMMA_KEYS:
            found |= gemma_config(self._kind, found, self._number, self._get("attention.sliding_window_pattern"))
        return found | (self._experts() if has_experts else {})

    def _experts(self) -> dict[str, Any]:
        count, used = (int(self._number(key)) for key in ("expert_count", "expert_used_count"))
        return {"num_local_experts": count, "num_experts_per_tok": used, "sliding_window": None}

    def _check_keys(self, more: frozenset[str]) -> None:
        """Raise ValueError for the first key of the architecture that would change results and is not understood.
        `more` are keys that are read of this architecture alone."""
        for key, value in self._values.items():
            own = key.removeprefix(f"{self._kind}.")
            if own == key or own in SHAPE | HARMLESS | more or value in NEUTRAL.get(own, ()):
                continue
            if own == "attention.sliding_window" and self._covers_context(value):
                continue
            raise ValueError(f"{self._path.name} has the metadata {key} = {value}, which is not supported")

    def _covers_context(self, window: Value) -> bool:
        """Return whether a sliding window never hides a token, because it is as long as the context, or 0 (none)."""
        return isinstance(window, int) and not 0 < window < self._number("context_length")

    def _get(self, key: str) -> Value:
        return self._values.get(f"{self._kind}.{key}")

    def _number(self, key: str, default: float | None = None) -> float:
        """Return a number of the architecture. Raises ValueError if it is not finite, or if it differs between layers,
        for which files have a list; KeyError if there is none, and no default."""
        name = f"{self._kind}.{key}"
        value = self._values.get(name)
        if value is None and default is not None and name not in self._values:
            return default
        if value is None:
            raise KeyError(name)
        found = set(value) if isinstance(value, tuple) else {value}
        one = found.pop() if len(found) == 1 else None
        if not isinstance(one, int | float) or not math.isfinite(one):
            raise ValueError(f"{self._path.name} has the metadata {name} = {value}, which is not one number")
        return one

    def _head_dim(self) -> int:
        heads, width = int(self._number("attention.head_count")), int(self._number("embedding_length"))
        if heads < 1:
            raise ValueError(f"{self._path.name} has {self._kind}.attention.head_count = {heads}")
        head_dim = int(self._number("attention.key_length", width // heads))
        for key in ("attention.value_length", "rope.dimension_count"):
            if (other := self._number(key, head_dim)) != head_dim:
                raise ValueError(
                    f"{self._path.name} has {self._kind}.{key} = {other}, and heads of {head_dim} numbers: that is not"
                    " supported"
                )
        return head_dim

    def _rope(self, head_dim: int) -> dict[str, Any]:
        """Return the `rope_parameters` of config.json."""
        theta = {"rope_theta": self._number("rope.freq_base", 10_000.0)}
        kind = str(self._get("rope.scaling.type") or "linear")
        factor = self._number("rope.scaling.factor", self._number("rope.scale_linear", 1.0)) or 1.0
        divisors = self._divisors(head_dim)
        if kind == "none" or (kind == "linear" and factor == 1.0 and not divisors):
            return theta | {"rope_type": "default"} if not divisors else theta | self._divided(divisors)
        if kind == "linear":
            return theta | (self._divided([factor * one for one in divisors]) if divisors else _linear(factor))
        if kind == "yarn" and not divisors:
            return theta | self._yarn(factor)
        beside = f" beside {ROPE_FACTORS}" if divisors else ""
        raise ValueError(
            f"{self._path.name} has {self._kind}.rope.scaling.type = {kind}{beside}: that is not supported"
        )

    def _yarn(self, factor: float) -> dict[str, Any]:
        """Return YaRN's parameters. llama.cpp multiplies its temperature, 0.1 ln(factor) + 1, by the file's
        `attn_factor`."""
        context = self._number("rope.scaling.original_context_length", self._number("context_length"))
        if self._number("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
            raise ValueError(f"{self._path.name} has {self._kind}.rope.scaling.yarn_ext_factor, other than 1")
        attention = self._number("rope.scaling.attn_factor", self._number("rope.scaling.yarn_attn_factor", 1.0))
        temperature = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": int(context),
            "beta_fast": self._number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": self._number("rope.scaling.yarn_beta_slow", 1.0),
            "attention_factor": attention * temperature,
        }

    def _divided(self, divisors: list[float]) -> dict[str, Any]:
        """Return parameters that divide each frequency by a number of its own: those of LongRoPE, with one list for
        sequences of all lengths and no temperature."""
        return {
            "rope_type": "longrope",
            "long_factor": divisors,
            "short_factor": divisors,
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": int(self._number("context_length")),
        }

    def _divisors(self, head_dim: int) -> list[float]:
        """Return the numbers of ROPE_FACTORS; empty if the file has no such tensor. Raises ValueError if they are not
        fp32, positive, and one for each frequency."""
        stored: StoredTensor | None = self._tensors.get(ROPE_FACTORS)
        if stored is None:
            return []
        file = stored.file or self._path
        divisors = np.fromfile(file, np.float32, head_dim // 2, offset=stored.place)
        if stored.kind != F32 or stored.shape != (head_dim // 2,) or len(divisors) < head_dim // 2:
            raise ValueError(f"{self._path.name}: {ROPE_FACTORS} must have {head_dim // 2} numbers of type F32")
        if not (np.isfinite(divisors).all() and (divisors > 0).all()):
            raise ValueError(f"{self._path.name}: {ROPE_FACTORS} must have positive numbers")
        return [float(one) for one in divisors]

    def _special_tokens(self) -> dict[str, Any]:
        """Return the ids of BOS, padding and the ends of an answer: the end of the text, and that of a turn."""
        found: dict[str, Any] = {}
        for name, key in (("bos_token_id", "bos_token_id"), ("pad_token_id", "padding_token_id")):
            if isinstance(value := self._values.get(f"tokenizer.ggml.{key}"), int):
                found[name] = value
        ends = [self._values.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
        known = list(dict.fromkeys(one for one in ends if isinstance(one, int)))
        return found | ({"eos_token_id": known[0] if len(known) == 1 else known} if known else {})


def _linear(factor: float) -> dict[str, Any]:
    return {"rope_type": "linear", "factor": factor}
