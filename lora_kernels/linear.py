"""Builds linear layers and embeddings in the fastest form available on their device, and says before how many bits they
take. Both read the tables of forms.py."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from lora_kernels import forms
from lora_kernels.forms import Embedding, Linear, LinearParts, Stored, choose
from lora_kernels.fp8 import Fp8Weight
from lora_kernels.quantized import AnyCoding, QuantizedWeight, Weight, dense, stack


def make_linear(
    weights: Weight | Sequence[Weight],
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> Linear:
    """Return a linear layer of a weight [out_features, in_features] in the first of `forms.FORMS` that fits it. On a
    CPU the layer holds a copy, and the caller should drop the original.

    Args:
        weights: the weight, or several that lie one below the other.
        dtype: of inputs and outputs. None means that of the weight.
        out_dtype: of outputs where the kernel can give it. None means `dtype`.
    """
    pieces = stack([weights] if isinstance(weights, Tensor | QuantizedWeight | Fp8Weight) else weights)
    stored = [Stored.of(piece, dtype) for piece in pieces]
    found = [choose(forms.FORMS, one) for one in stored]
    for form, one in zip(found, stored, strict=True):
        if form and (form.takes_others or all(other is form for other in found)):
            return form.make(LinearParts(pieces, bias, one.dtype, out_dtype))
    tensors = [dense(piece, one.dtype) for piece, one in zip(pieces, stored, strict=True)]
    return make_linear(tensors[0] if len(tensors) == 1 else torch.cat(tensors), bias, dtype, out_dtype)


def make_embedding(weight: Weight, head: Linear, dtype: torch.dtype, *, tied: bool) -> Embedding:
    """Return the embedding of a weight [vocab_size, hidden_size], with rows in `dtype`, in the first of
    `forms.EMBEDDING_FORMS` that fits. Where `tied` says that `head` has the same weight and both are quantised, they
    share its memory."""
    form = choose(forms.EMBEDDING_FORMS, Stored.of(weight, dtype))
    if form is None:
        return make_embedding(dense(weight), head, dtype, tied=tied)
    return form.make(weight, head if tied else None, dtype)


def kept_bits(coding: AnyCoding, device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the bits of a device's memory that each number of a quantised weight takes if the device computes with
    its codes as they are, for inputs in `dtype`. None means that the weight is dequantised."""
    stored = Stored(coding, device, dtype)
    form = choose(forms.FORMS, stored)
    return form.bits(stored) if form else None


@cache
def packed_bits(device: torch.device, dtype: torch.dtype, *, is_bf16: bool) -> int | None:
    """Return the bits that each number of a weight takes in the copy that a linear layer on a CPU makes of it. None
    means that the layer uses the tensor itself. `is_bf16` tells whether all numbers are bf16's."""
    stored = Stored(None, device, dtype, is_bf16)
    form = choose(forms.FORMS, stored)
    bits = form.bits(stored) if form else None
    return None if bits is None else int(bits)


def embedding_bits(device: torch.device, dtype: torch.dtype, *, is_bf16: bool) -> int:
    """Return the bits of memory that each number of an embedding takes if its weight is a tensor. The arguments are
    those of `packed_bits`."""
    stored = Stored(None, device, dtype, is_bf16)
    form = choose(forms.EMBEDDING_FORMS, stored)
    return int((form and form.bits(stored)) or 8 * dtype.itemsize)
