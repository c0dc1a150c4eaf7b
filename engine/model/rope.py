"""Rotary position embedding: the frequencies of each published scaling, and the angles of a step, in fp32."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Frequencies of a rotary embedding.

    Attributes:
        inv_freq: [head_dim / 2] floats, in radians per position.
        attention_factor: factor of cos and sin (YaRN's temperature; 1 for other scalings).
    """

    kind: str
    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0


def read_rope(config: Json, head_dim: int) -> RopeSpec:
    """Computes frequencies from a model's `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before
    it). Raises ValueError if the scaling is unknown, or only a part of each head is rotated."""
    params = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = params.get("rope_type") or params.get("type") or "default"
    if kind not in _SCALINGS:
        raise ValueError(f"rope_type {kind!r} is not supported; supported: {', '.join(_SCALINGS)}")
    if params.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError("partial_rotary_factor other than 1 is not supported")
    theta = params.get("rope_theta") or config.get("rope_theta") or 10_000.0
    params.setdefault("rope_theta", theta)
    params.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    # Powers in fp32, as the models were trained with: fp64 would differ in the last bits at large positions.
    inv_freq = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    scaled, attention_factor = _SCALINGS[kind](inv_freq, params)
    return RopeSpec(kind=kind, inv_freq=tuple(scaled.tolist()), attention_factor=attention_factor)


def _default(inv_freq: Tensor, params: Json) -> tuple[Tensor, float]:
    return inv_freq, 1.0


def _linear(inv_freq: Tensor, params: Json) -> tuple[Tensor, float]:
    return inv_freq / params["factor"], 1.0


def _llama3(inv_freq: Tensor, params: Json) -> tuple[Tensor, float]:
    """Scales like Llama 3.1: divides low frequencies by `factor`, keeps high ones, interpolates between them. Returns
    the frequencies and the attention factor 1."""
    factor, low, high = params["factor"], params["low_freq_factor"], params["high_freq_factor"]
    turns = params["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * inv_freq / factor + kept * inv_freq, 1.0


def _yarn(inv_freq: Tensor, params: Json) -> tuple[Tensor, float]:
    """Scales like YaRN (Peng et al. 2023): over the dimensions, a ramp leads from unscaled frequencies to those divided
    by `factor`. Returns the frequencies and the factor of cos and sin."""
    factor, half = params["factor"], len(inv_freq)
    low = _yarn_dim(params, params.get("beta_fast") or 32, 2 * half)
    high = _yarn_dim(params, params.get("beta_slow") or 1, 2 * half)
    if params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    ramp = ((torch.arange(half, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return inv_freq / factor * ramp + inv_freq * (1 - ramp), _yarn_temperature(params)


def _yarn_dim(params: Json, turns: float, dim: int) -> float:
    """Returns the fractional index of the frequency whose wave makes `turns` turns over the original context."""
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


_SCALINGS = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}


def no_rope(head_dim: int) -> RopeSpec:
    """Returns the embedding of layers that rotate nothing: all frequencies are 0, so that cos is 1 and sin is 0."""
    return RopeSpec(kind="none", inv_freq=(0.0,) * (head_dim // 2))


@dataclass(frozen=True, slots=True)
class Angles:
    """The rotation of a step, shared by all layers of one rotary embedding: `cos` and `sin`, fp32 [num_rows, 1,
    head_dim], where the first half of `sin` is negated. See `Pointwise.rotate`."""

    cos: Tensor
    sin: Tensor


def angles(positions: Tensor, inv_freq: Tensor, attention_factor: float) -> Angles:
    """Returns the rotation of rows at `positions` (int [num_rows]) by the frequencies `inv_freq` (fp32 [head_dim / 2]);
    cos and sin are multiplied by `attention_factor`."""
    turns = positions.to(torch.float32)[:, None, None] * inv_freq
    cos, sin = turns.cos() * attention_factor, turns.sin() * attention_factor
    return Angles(cos=torch.cat((cos, cos), -1), sin=torch.cat((-sin, sin), -1))
