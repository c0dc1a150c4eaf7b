"""Linear layers in FP8 on a GPU: weights and activations in e4m3, with a scale for each output and each row.

Activations are coded on the device, and products are torch's. An adapter reads the activations before they are coded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lora_kernels.fp8 import Fp8Weight
from lora_kernels.gpu.coded_rows import code_rows

UNIT = 16
"""The numbers of outputs and of inputs of torch's FP8 products must be multiples of this."""


def can_multiply(weight: Fp8Weight) -> bool:
    return not (weight.shape[0] % UNIT or weight.shape[1] % UNIT)


class Fp8Part:
    """The linear layer of one piece of a weight, in FP8. `bias` is [features], or None. Raises ValueError if
    `can_multiply` is False."""

    def __init__(self, weight: Fp8Weight, bias: Tensor | None) -> None:
        if not can_multiply(weight):
            raise ValueError(f"FP8 products need multiples of {UNIT} outputs and inputs, not {list(weight.shape)}")
        self.weight, self._bias = weight, bias
        self._numbers, self._scales = weight.numbers.T, weight.scales[None, :].contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """Return the outputs, bf16 [num_rows, features], of `x`, contiguous bf16 [num_rows, width]."""
        codes, scales = code_rows(x, torch.float8_e4m3fn)
        out = torch._scaled_mm(codes, self._numbers, scales, self._scales, out_dtype=x.dtype)
        return out if self._bias is None else out.add_(self._bias)
