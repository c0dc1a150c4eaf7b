"""The row-wise operations between a decoder's matrix products: a protocol of four calls, implemented here in torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Pointwise(Protocol):
    """Row-wise operations of a decoder. Results are rounded where Hugging Face's models round them, so that the outputs
    are the same."""

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Adds `delta`, if given, to `x` in place, and returns the weighted RMSNorm of the sum, a new tensor.

        The sum is normalised in fp32, rounded to the dtype of `x`, and then multiplied by `weight`, in that order. If
        `weight` is of a wider dtype, fp32, the product is rounded instead.

        Args:
            x, delta: [num_rows, width].
            weight: [width].
        """

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Applies the rotary embedding to the first `rotary_dim` dimensions of each head of `x` [num_rows, heads,
        head_dim] in place. Dimension i is paired with i + rotary_dim / 2.

        Args:
            cos, sin: fp32 [num_rows, 1, rotary_dim]; the first half of `sin` is negated, so that the result is
                `x * cos + roll(x, rotary_dim / 2) * sin`.
        """

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """Returns silu(gate) * up, where `gate_up` [num_rows, 2 * width] holds gate and up side by side."""

    def geglu(self, gate_up: Tensor) -> Tensor:
        """Returns gelu(gate) * up, like `swiglu`, with the approximation of GELU by tanh."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns RMSNorm(x) * weight over the last dimension, a new tensor, rounded as in `Pointwise.add_norm`."""
    if weight.dtype == x.dtype:
        return F.rms_norm(x, (x.shape[-1],), None, eps) * weight
    return (F.rms_norm(x.to(weight.dtype), (x.shape[-1],), None, eps) * weight).to(x.dtype)


GELU_LINEAR = 2 * math.sqrt(2 / math.pi)
GELU_CUBIC = 0.044715 * GELU_LINEAR
"""GELU's approximation by tanh (Hendrycks and Gimpel 2016) is x * sigmoid(GELU_LINEAR * x + GELU_CUBIC * x^3)."""


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The RMSNorms of query and key heads, for models that have them. `query` and `key` are the weights, [head_dim]."""

    query: Tensor
    key: Tensor
    eps: float

    def apply(self, query_key: Tensor, heads: int) -> Tensor:
        """Returns normalised and weighted copies of query and key heads, `query_key` [num_rows, heads + kv_heads,
        head_dim], the first `heads` of which are query heads. Rounded as in `Pointwise.add_norm`."""
        query, key = query_key[:, :heads], query_key[:, heads:]
        return torch.cat((rms_norm(query, self.query, self.eps), rms_norm(key, self.key, self.eps)), dim=1)


@dataclass(frozen=True, slots=True)
class ProjectionNorms:
    """The RMSNorms of whole queries and keys, of all heads together. `query` and `key` are the weights, [heads *
    head_dim] and [kv_heads * head_dim]."""

    query: Tensor
    key: Tensor
    eps: float

    def apply(self, qkv: Tensor) -> None:
        """Normalises query and key in place. `qkv` is [num_rows, (heads + 2 * kv_heads) * head_dim]."""
        query, key, _ = qkv.split((len(self.query), len(self.key), len(self.key)), dim=1)
        query.copy_(rms_norm(query, self.query, self.eps))
        key.copy_(rms_norm(key, self.key, self.eps))


def rotated_heads(
    pointwise: Pointwise, qkv: Tensor, kv: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits `qkv` [num_rows, (heads + 2 * kv_heads) * head_dim] into query, key and value [num_rows, heads or
    kv_heads, head_dim], and applies head norms and the rotary embedding to query and key (without norms, in place in
    `qkv`). `kv` gives only the number of KV heads and their dimension, and is not written."""
    kv_heads, head_dim = kv.shape[3:]
    split = qkv.view(len(qkv), -1, head_dim)
    heads = split.shape[1] - 2 * kv_heads
    query_key, value = split[:, : heads + kv_heads], split[:, heads + kv_heads :]
    if norms is not None:
        query_key = norms.apply(query_key, heads)
    pointwise.rotate(query_key, cos, sin)
    return query_key[:, :heads], query_key[:, heads:], value


class TorchPointwise:
    """`Pointwise` in torch, for any device."""

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Adds `delta`, if given, to `x` in place. Returns RMSNorm(x) * weight, a new tensor: `Pointwise.add_norm`."""
        if delta is not None:
            x += delta
        return rms_norm(x, weight, eps)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Applies the rotary embedding to `x` [num_rows, heads, head_dim] in place, see `Pointwise.rotate`."""
        part = x[..., : cos.shape[-1]]
        part.copy_(torch.addcmul(part * cos, part.roll(part.shape[-1] // 2, -1), sin))

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """Returns silu(gate) * up, where `gate_up` [num_rows, 2 * width] holds gate and up side by side."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def geglu(self, gate_up: Tensor) -> Tensor:
        """Returns gelu(gate) * up, like `swiglu`, with the approximation of GELU by tanh."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh").mul_(up)
