"""Rotary position embedding: the frequencies of each published scaling, and the angles of a step, in fp32."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Frequencies of a rotary embedding."""

    kind: str
    inv_freq: tuple[float, ...]
    """[rotary_dim / 2] floats, in radians per position; rotary_dim is head_dim, or less where only the first part of
    each head is rotated."""
    attention_factor: float = 1.0
    """Factor of cos and sin (the temperature of YaRN and LongRoPE; 1 for other scalings)."""
    short_inv_freq: tuple[float, ...] = ()
    """Frequencies in place of `inv_freq` where no sequence has more than `short_positions` tokens. Empty means that
    they are the same."""
    short_positions: int = 0

    def served(self, max_len: int) -> RopeSpec:
        """Return the rotary embedding for sequences of at most `max_len` tokens, with one set of frequencies:
        LongRoPE's short ones if they suffice, else its long ones."""
        # Hugging Face changes frequencies when a sequence grows, and computes its KV again; here keys of a page must
        # serve every sequence that shares it.
        if not self.short_inv_freq:
            return self
        chosen = self.short_inv_freq if max_len <= self.short_positions else self.inv_freq
        return replace(self, inv_freq=chosen, short_inv_freq=(), short_positions=0)


def read_rope(config: Json, head_dim: int, *, partial: bool = False) -> RopeSpec:
    """Return the rotary embedding that config.json describes, in `rope_parameters` (transformers 5) or `rope_theta` and
    `rope_scaling` (before it). Raises ValueError if the scaling is unknown, or only a part of each head is rotated and
    `partial` is False."""
    params = _parameters(config)
    kind = params.get("rope_type") or params.get("type") or "default"
    kind = "longrope" if kind == "su" else kind  # its name in the first Phi-3 checkpoints
    if kind not in (*_SCALINGS, "longrope"):
        raise ValueError(f"rope_type {kind!r} is not supported; supported: {', '.join(_SCALINGS)}, longrope")
    rotated: float = params.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if rotated != 1.0 and not partial:
        raise ValueError("partial_rotary_factor other than 1 is not supported")
    rotary_dim = int(head_dim * rotated)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ValueError(f"partial_rotary_factor {rotated} of heads of {head_dim} numbers is not supported")
    theta = params.get("rope_theta") or config.get("rope_theta") or 10_000.0
    params.setdefault("rope_theta", theta)
    original = config.get("original_max_position_embeddings") or config.get("max_position_embeddings")
    params.setdefault("original_max_position_embeddings", original)
    # Powers in fp32, as the models were trained with: fp64 would differ in the last bits at large positions.
    inv_freq = 1.0 / (theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim))
    if kind == "longrope":
        return _longrope(inv_freq, params, config)
    for name in NEEDED[kind]:
        if not isinstance(params.get(name), int | float):
            raise ValueError(f"config.json's rope_scaling of type {kind!r} must have a number {name}")
    scaled, attention_factor = _SCALINGS[kind](inv_freq, params)
    return RopeSpec(kind=kind, inv_freq=tuple(scaled.tolist()), attention_factor=attention_factor)


def _parameters(config: Json) -> dict[str, Any]:
    """Return the parameters of both places that may have some. Raises ValueError if one is no object."""
    found: dict[str, Any] = {}
    for place in ("rope_scaling", "rope_parameters"):
        if not isinstance(part := config.get(place) or {}, Mapping):
            raise ValueError(f"config.json's {place} must be an object")
        found |= part
    return found


def _default(inv_freq: Tensor, params: Json) -> tuple[Tensor, float]:
    return inv_freq, 1.0


def _linear(inv_freq: Tensor, params: Json) -> tuple[Tensor, float]:
    return inv_freq / params["factor"], 1.0


def _llama3(inv_freq: Tensor, params: Json) -> tuple[Tensor, float]:
    """Scale rotary frequencies like Llama 3.1: divide low frequencies by `factor`, keep high ones, interpolate between
    them. Return the frequencies and the attention factor 1."""
    factor, low, high = params["factor"], params["low_freq_factor"], params["high_freq_factor"]
    turns = params["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * inv_freq / factor + kept * inv_freq, 1.0


def _longrope(inv_freq: Tensor, params: Json, config: Json) -> RopeSpec:
    """Scale rotary frequencies like LongRoPE (Ding et al. 2024): divide each by a factor of one of two lists, for long
    sequences or short ones. Raises ValueError if a list has not a positive number for each."""
    divisors = []
    for name in ("long_factor", "short_factor"):
        factors = params.get(name) or ()
        if len(factors) != len(inv_freq) or not all(factor > 0 for factor in factors):
            raise ValueError(f"rope_scaling: {name} must have {len(inv_freq)} positive numbers")
        divisors.append(torch.tensor(factors, dtype=torch.float32))
    long, short = (tuple((1.0 / (factors / inv_freq)).tolist()) for factors in divisors)
    original = params["original_max_position_embeddings"]
    factor = params.get("factor") or config["max_position_embeddings"] / original
    temperature = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    given = params.get("attention_factor")
    return RopeSpec("longrope", long, temperature if given is None else given, short, original)


def _yarn(inv_freq: Tensor, params: Json) -> tuple[Tensor, float]:
    """Scale rotary frequencies like YaRN (Peng et al. 2023): over the dimensions, a ramp leads from unscaled
    frequencies to those divided by `factor`. Return the frequencies and the factor of cos and sin."""
    factor, half = params["factor"], len(inv_freq)
    low = _yarn_dim(params, params.get("beta_fast") or 32, 2 * half)
    high = _yarn_dim(params, params.get("beta_slow") or 1, 2 * half)
    if params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    ramp = ((torch.arange(half, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return inv_freq / factor * ramp + inv_freq * (1 - ramp), _yarn_temperature(params)


def _yarn_dim(params: Json, turns: float, dim: int) -> float:
    """Return the fractional index of the rotary frequency whose wave makes `turns` turns over the original context.
    YaRN's ramp begins or ends there."""
    context, theta = params["original_max_position_embeddings"], params["rope_theta"]
    return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))


def _yarn_temperature(params: Json) -> float:
    def mscale(scale: float) -> float:
        return 0.1 * scale * math.log(params["factor"]) + 1.0 if params["factor"] > 1 else 1.0

    if params.get("attention_factor") is not None:
        return params["attention_factor"]
    if params.get("mscale") and params.get("mscale_all_dim"):
        return mscale(params["mscale"]) / mscale(params["mscale_all_dim"])
    return mscale(1.0)


NEEDED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
"""Parameters without which a scaling cannot be computed."""
_SCALINGS = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}


def no_rope(head_dim: int) -> RopeSpec:
    """Return the rotary embedding of layers that rotate nothing: all frequencies are 0, so that cos is 1 and sin is
    0."""
    return RopeSpec(kind="none", inv_freq=(0.0,) * (head_dim // 2))


@dataclass(frozen=True, slots=True)
class Angles:
    """The rotation of queries and keys in one step, shared by all layers of one rotary embedding: `cos` and `sin`, fp32
    [num_rows, 1, rotary_dim], where the first half of `sin` is negated. See `Pointwise.rotate`."""

    cos: Tensor
    sin: Tensor


def angles(positions: Tensor, inv_freq: Tensor, attention_factor: float) -> Angles:
    """Return the rotation of rows at `positions` (int [num_rows]) by the frequencies `inv_freq`, fp32 [rotary_dim / 2].
    Cos and sin are multiplied by `attention_factor`."""
    turns = positions.to(torch.float32)[:, None, None] * inv_freq
    cos, sin = turns.cos() * attention_factor, turns.sin() * attention_factor
    return Angles(cos=torch.cat((cos, cos), -1), sin=torch.cat((-sin, sin), -1))
