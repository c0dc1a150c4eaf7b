"""Builds the linears of a layer's experts in the fastest form available on their device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain, pairwise
from typing import Protocol

import torch
from torch import Tensor

from lora_kernels.forms import has_numba
from lora_kernels.linear import Linear, make_linear, packed_bits
from lora_kernels.quantized import Weight, dense


class GroupedLinear(Protocol):
    """One projection of a layer with experts (gate and up together, or down) for all its experts: each row is
    multiplied by the weights of its own expert."""

    def __call__(self, x: Tensor, starts: Tensor) -> Tensor:
        """Return each entry's output of its own expert's linear, a new tensor [num_entries, out_features].

        Args:
            x: [num_entries, in_features], sorted by expert.
            starts: int32 [experts + 1], on the device of `x`: see `Routing.starts`.
        """


def make_grouped(
    weights: Iterable[Sequence[Weight]],
    count: int,
    dtype: torch.dtype,
    out_dtype: torch.dtype | None = None,
    biases: Tensor | None = None,
) -> GroupedLinear:
    """Return one projection of a layer's `count` experts in the fastest form: one kernel where weights are tensors, on
    a GPU or with numba, else one expert after the other.

    Args:
        weights: yields, expert by expert, weights that lie one below the other.
        out_dtype: of outputs where the kernel can give it. None means `dtype`.
        biases: [count, out_features], or None.
    """
    experts = iter(weights)
    first = next(experts)
    everyone = chain([first], experts)
    # Imported late: a machine without CUDA may have no triton, and the measurements on GPUs hide numba.
    if all(isinstance(piece, Tensor) for piece in first):
        stacked = (torch.cat([dense(piece) for piece in pieces]).to(dtype) for pieces in everyone)
        if first[0].device.type == "cuda":
            from lora_kernels.gpu.grouped_linear import DeviceExperts

            return DeviceExperts(stacked, count, out_dtype, biases)
        if has_numba():
            from lora_kernels.cpu.numba_grouped import PackedExperts

            return PackedExperts(stacked, count, out_dtype, biases)
    each = [None] * count if biases is None else biases
    return ExpertByExpert(
        [make_linear(pieces, bias, dtype, out_dtype) for pieces, bias in zip(everyone, each, strict=True)]
    )


@cache
def grouped_bits(device: torch.device, dtype: torch.dtype, *, is_bf16: bool) -> int:
    """Return the bits of memory that each number of a weight takes in the result of `make_grouped`, if weights are
    tensors. The arguments are those of `packed_bits`."""
    if device.type == "cpu" and has_numba():
        return 16 if is_bf16 else 8 * dtype.itemsize
    return packed_bits(device, dtype, is_bf16=is_bf16) or 8 * dtype.itemsize


class ExpertByExpert:
    """A `GroupedLinear` of one linear for each expert, which is called for the entries of that expert alone."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        self._linears = linears

    def __call__(self, x: Tensor, starts: Tensor) -> Tensor:
        """Return each entry's output, a new tensor: see `GroupedLinear`. The host waits for `starts`."""
        bounds = pairwise(starts.tolist())
        parts = [
            linear(x[start:stop]) for linear, (start, stop) in zip(self._linears, bounds, strict=True) if start < stop
        ]
        return torch.cat(parts)
