"""Linear layers in INT8 on a GPU: weights and activations in integers, with a scale for each output and each row.

Activations are coded on the device, and sums of integers, which are exact, are torch's. An adapter reads activations
before they are coded. Only checkpoints that were made for such activations are computed so.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lora_kernels.gpu.coded_rows import code_rows
from lora_kernels.gpu.launch import with_constants
from lora_kernels.gpu.triton_coding import scale_sums_kernel
from lora_kernels.quantized import QuantizedWeight

UNIT, LEAST_ROWS = 16, 32
"""Numbers of outputs and inputs of which products need multiples, and the least number of rows that they take."""
BLOCK = 1024
SUMS_BYTES = 64 << 20
"""Bytes of sums at a time, which captured steps with many rows need besides their outputs."""


def has_integer_products(weight: QuantizedWeight) -> bool:
    """Returns whether `Int8Part` computes with a weight."""
    return weight.coding.by_rows and weight.order is None and not (weight.shape[0] % UNIT or weight.shape[1] % UNIT)


class Int8Part:
    """A piece of a weight in INT8, for which `has_integer_products` is True. `bias` is [features], or None."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        self._numbers = (weight.codes ^ 128).view(torch.int8).T
        self._scales, self._bias = weight.scales[:, 0].float(), bias

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the outputs, [num_rows, features], of `x`, contiguous [num_rows, width]. A row has the same bits
        among any others."""
        rows, features = len(x), self._numbers.shape[1]
        codes, scales = code_rows(x, torch.int8, LEAST_ROWS)
        out = x.new_empty(rows, features)
        step = max(BLOCK, SUMS_BYTES // (4 * len(codes)) // BLOCK * BLOCK)
        for first in range(0, features if rows else 0, step):
            self._multiply(codes, scales, slice(first, first + step), out)
        return out

    def _multiply(self, codes: Tensor, scales: Tensor, piece: slice, out: Tensor) -> None:
        """Writes the outputs of a piece of the features."""
        sums, factors = torch._int_mm(codes, self._numbers[:, piece]), self._scales[piece]
        bias = factors if self._bias is None else self._bias[piece]
        kernel = with_constants(scale_sums_kernel, HAS_BIAS=self._bias is not None, BLOCK=BLOCK, num_warps=4)
        grid, target = (len(out), -(-len(factors) // BLOCK)), out[:, piece]
        kernel(grid, sums, scales, factors, bias, target, len(factors), out.stride(0))
