"""The row-wise operations between a decoder's matrix products: a protocol of five calls, implemented here in torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BoundedSwiglu:
    """An activation: (up + 1) * gate * sigmoid(slope * gate), where gate is at most `limit` and up -`limit` to `limit`
    (gpt-oss, 2025)."""

    limit: float
    slope: float


class Pointwise(Protocol):
    """Row-wise operations of a decoder. Results are rounded where Hugging Face's models round them, so that the outputs
    are the same."""

    def add_norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor | None, eps: float, factor: float = 1.0
    ) -> Tensor:
        """Add `delta` times `factor`, if given, to `x` [num_rows, width] in place, and return the weighted RMSNorm of
        the sum, a new tensor, or `x` if `weight` is None. Product and sum are rounded to the dtype of `x`; if only
        `weight` is fp32, the product is rounded instead."""

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Apply the rotary embedding to the first `rotary_dim` dimensions of each head of `x` [num_rows, heads,
        head_dim] in place: `x * cos + roll(x, rotary_dim / 2) * sin`, both fp32 [num_rows, 1, rotary_dim]. The first
        half of `sin` is negated."""

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up, where `gate_up` [num_rows, 2 * width] holds gate and up side by side."""

    def geglu(self, gate_up: Tensor) -> Tensor:
        """Return gelu(gate) * up, like `swiglu`, with the approximation of GELU by tanh."""

    def bounded_swiglu(self, gate_up: Tensor, bounds: BoundedSwiglu) -> Tensor:
        """Return the activation that `bounds` describes, like `swiglu`. Only the result and gate * sigmoid(slope *
        gate) are rounded to the dtype of `gate_up`. NaN stays NaN."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return RMSNorm(x) * weight over the last dimension, a new tensor, rounded as in `Pointwise.add_norm`."""
    if weight.dtype == x.dtype:
        return F.rms_norm(x, (x.shape[-1],), None, eps) * weight
    return (F.rms_norm(x.to(weight.dtype), (x.shape[-1],), None, eps) * weight).to(x.dtype)


GELU_LINEAR = 2 * math.sqrt(2 / math.pi)
GELU_CUBIC = 0.044715 * GELU_LINEAR
"""GELU's approximation by tanh (Hendrycks and Gimpel 2016) is x * sigmoid(GELU_LINEAR * x + GELU_CUBIC * x^3)."""


@dataclass(frozen=True, slots=True)
class QkNorms:
    """The RMSNorms of queries and keys before the rotary embedding, for models that have them."""

    query: Tensor
    key: Tensor
    """`query` and `key`: the weights: [head_dim], by which each head is normalised by itself (Qwen 3), or [heads *
    head_dim] and [kv_heads * head_dim], by which all heads of a row are normalised together (OLMo 2)."""
    eps: float

    def apply(self, query_key: Tensor, heads: int) -> None:
        """Normalise query and key heads in place. `query_key` is [num_rows, heads + kv_heads, head_dim], of which the
        first `heads` are query heads. Rounded as in `Pointwise.add_norm`."""
        for part, weight in ((query_key[:, :heads], self.query), (query_key[:, heads:], self.key)):
            of_norms = part.flatten(1).view(len(part), -1, len(weight))
            part.copy_(rms_norm(of_norms, weight, self.eps).view(part.shape))


def split_heads(qkv: Tensor, kv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the query, key and value of `qkv` [num_rows, (heads + 2 * kv_heads) * head_dim], as views [num_rows, heads
    or kv_heads, head_dim]. `kv` gives only the number of KV heads and their dimension."""
    kv_heads, head_dim = kv.shape[3:]
    heads = qkv.view(len(qkv), -1, head_dim)
    query, key, value = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    return query, key, value


def rotate_heads(
    pointwise: Pointwise, qkv: Tensor, kv: Tensor, cos: Tensor, sin: Tensor, norms: QkNorms | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply norms and the rotary embedding to query and key of `qkv`, in place, and return them and the value: see
    `split_heads`."""
    query, key, value = split_heads(qkv, kv)
    heads = query.shape[1]
    query_key = qkv.view(len(qkv), -1, query.shape[2])[:, : heads + key.shape[1]]
    if norms is not None:
        norms.apply(query_key, heads)
    pointwise.rotate(query_key, cos, sin)
    return query, key, value


class TorchPointwise:
    """`Pointwise` in torch, for any device."""

    def add_norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor | None, eps: float, factor: float = 1.0
    ) -> Tensor:
        """Add `delta` times `factor`, if given, to `x` in place. Return RMSNorm(x) * weight, a new tensor, or `x`:
        `Pointwise.add_norm`."""
        if delta is not None:
            x += delta if factor == 1.0 else delta * factor
        return x if weight is None else rms_norm(x, weight, eps)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Apply the rotary embedding to `x` [num_rows, heads, head_dim] in place, see `Pointwise.rotate`."""
        part = x[..., : cos.shape[-1]]
        part.copy_(torch.addcmul(part * cos, part.roll(part.shape[-1] // 2, -1), sin))

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up, where `gate_up` [num_rows, 2 * width] holds gate and up side by side."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def geglu(self, gate_up: Tensor) -> Tensor:
        """Return gelu(gate) * up, like `swiglu`, with the approximation of GELU by tanh."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh").mul_(up)

    def bounded_swiglu(self, gate_up: Tensor, bounds: BoundedSwiglu) -> Tensor:
        """Return the activation that `bounds` describes: `Pointwise.bounded_swiglu`."""
        gate, up = (part.float() for part in gate_up.chunk(2, dim=-1))
        gate = gate.clamp(max=bounds.limit)
        active = (gate * torch.sigmoid(bounds.slope * gate)).to(gate_up.dtype)
        return (active.float() * (up.clamp(-bounds.limit, bounds.limit) + 1)).to(gate_up.dtype)
