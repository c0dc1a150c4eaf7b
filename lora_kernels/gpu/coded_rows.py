"""Codes rows of activations in 8 bits on a GPU, with a scale for each row."""

from __future__ import annotations

import torch
from torch import Tensor

from lora_kernels.fp8 import LARGEST_FP8
from lora_kernels.gpu.launch import with_constants
from lora_kernels.gpu.triton_coding import code_rows_kernel

LARGEST = {torch.float8_e4m3fn: LARGEST_FP8, torch.int8: 127.0}
"""Largest code of each dtype."""
BLOCK = 4096


def code_rows(x: Tensor, dtype: torch.dtype, least: int = 0) -> tuple[Tensor, Tensor]:
    """Quantise `x`, contiguous [num_rows, width], to 8 bits, each row by its own scale, which is NaN if a number is not
    finite. Return codes in `dtype`, [max(num_rows, least), width], and scales, fp32 [num_rows, 1]."""
    codes = x.new_empty(max(len(x), least), x.shape[1], dtype=dtype)
    scales = x.new_empty(len(x), 1, dtype=torch.float32)
    if len(x):
        rounds = not dtype.is_floating_point
        kernel = with_constants(code_rows_kernel, LARGEST=LARGEST[dtype], ROUNDS=rounds, BLOCK=BLOCK, num_warps=8)
        kernel((len(x),), x, codes, scales, x.shape[1])
    return codes, scales
