"""Builds linear layers in the fastest form available on their device."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

Linear = Callable[[Tensor], Tensor]
"""Maps [num_rows, in_features] to [num_rows, out_features]. The result is a new tensor, which the caller may modify."""


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Returns a linear layer of `weight` [out_features, in_features] in the fastest form available on its device.

    On a CPU the layer holds a packed copy of the weight, and the caller should drop the original; packing pays even
    where tied embeddings are then stored twice. A weight for which `can_pack` is True is packed for numba_gemm.py, and
    other fp32 and bf16 weights for oneDNN where it computes in their dtype; the rest are not packed. Measured on two
    cores with AVX512-BF16, all layers of a 135M model for 1 / 32 / 256 rows take 8 / 20 / 126 ms, with oneDNN 13 / 24 /
    137 ms, and unpacked 38 ms for 32 rows. The model's 49152-wide head takes 4.7, 6.0 and 8.9 ms for 32 rows (fp32:
    44 ms packed, 71 ms unpacked).
    """
    if weight.device.type == "cpu" and find_spec("numba"):
        # Imported late because a few platforms have no numba.
        from lora_kernels.cpu.numba_gemm import PackedLinear, can_pack

        if can_pack(weight):
            return PackedLinear(weight, bias)
    if weight.device.type == "cpu" and _can_pack(weight.dtype):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return lambda x: F.linear(x, weight, bias)


def _can_pack(dtype: torch.dtype) -> bool:
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
