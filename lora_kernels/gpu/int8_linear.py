"""Linear layers in INT8 on a GPU, for checkpoints made for it: weights have a scale for each output, activations, coded
on the device, one for each row. An adapter reads activations before they are coded."""

from __future__ import annotations

import torch
from torch import Tensor

from lora_kernels.gpu.coded_rows import code_rows
from lora_kernels.gpu.launch import with_constants
from lora_kernels.gpu.triton_coding import scale_sums_kernel
from lora_kernels.quantized import QuantizedWeight

UNIT, LEAST_ROWS = 16, 32
"""torch's integer products need multiples of UNIT outputs and inputs, and at least LEAST_ROWS rows."""
BLOCK = 1024
SUMS_BYTES = 64 << 20
"""Bytes of int32 sums that are computed at a time. Captured steps with many rows need them besides their outputs."""


def has_integer_products(weight: QuantizedWeight) -> bool:
    """Return whether `Int8Part` can compute with a weight: one with a scale for each output, made for activations in 8
    bits (`Coding.by_rows`), whose columns are in the order of inputs and whose sizes are multiples of UNIT."""
    return weight.coding.by_rows and weight.order is None and not (weight.shape[0] % UNIT or weight.shape[1] % UNIT)


class Int8Part:
    """The linear layer of one piece of a weight, in INT8, for which `has_integer_products` is True. `bias` is
    [features], or None."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        self._numbers = (weight.codes ^ 128).view(torch.int8).T
        self._scales, self._bias = weight.scales[:, 0].float(), bias

    def __call__(self, x: Tensor) -> Tensor:
        """Return the outputs, [num_rows, features], of `x`, contiguous [num_rows, width]. The bits of a row's outputs
        do not depend on the other rows."""
        rows, features = len(x), self._numbers.shape[1]
        codes, scales = code_rows(x, torch.int8, LEAST_ROWS)
        out = x.new_empty(rows, features)
        step = max(BLOCK, SUMS_BYTES // (4 * len(codes)) // BLOCK * BLOCK)
        for first in range(0, features if rows else 0, step):
            self._multiply(codes, scales, slice(first, first + step), out)
        return out

    def _multiply(self, codes: Tensor, scales: Tensor, piece: slice, out: Tensor) -> None:
        """Compute the features `piece` from the rows' codes and scales, and write them to these columns of `out`."""
        sums, factors = torch._int_mm(codes, self._numbers[:, piece]), self._scales[piece]
        bias = factors if self._bias is None else self._bias[piece]
        kernel = with_constants(scale_sums_kernel, HAS_BIAS=self._bias is not None, BLOCK=BLOCK, num_warps=4)
        grid, target = (len(out), -(-len(factors) // BLOCK)), out[:, piece]
        kernel(grid, sums, scales, factors, bias, target, len(factors), out.stride(0))
