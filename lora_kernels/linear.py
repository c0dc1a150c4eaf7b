"""Builds linear layers and embeddings in the fastest form available on their device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from lora_kernels.fp8 import Fp8Weight
from lora_kernels.quantized import AnyCoding, Coding, QuantizedWeight, Weight, dense, stack

if TYPE_CHECKING:
    from lora_kernels.cpu.quantized_linear import QuantizedLinear
    from lora_kernels.gpu.quantized_linear import DeviceLinear

Linear = Callable[[Tensor], Tensor]
"""Maps [num_rows, in_features] to [num_rows, out_features]. The result is a new tensor, which the caller may modify."""


class Embedding(Protocol):
    """Looks up the rows, [num_rows, hidden_size], of token ids, integers [num_rows]. Returns them in `out` if it is
    given, else in a new tensor."""

    def __call__(self, token_ids: Tensor, out: Tensor | None = None) -> Tensor: ...


def make_linear(
    weights: Weight | Sequence[Weight],
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> Linear:
    """Returns a linear layer of a weight [out_features, in_features] in the fastest form available on its device.

    On a CPU the layer holds a copy of the weight (`packed_bits`), and the caller should drop the original;
    packing pays even where tied embeddings are then stored twice. On a GPU they are stored once. Weights for which
    `can_pack` or `computes_fp32` is True are packed for numba_gemm.py or numba_dense.py, and other fp32 and bf16
    weights for oneDNN where it computes in their dtype; the rest are not packed. Measured on two cores with
    AVX512-BF16, all layers of a 135M model for 1 / 32 / 256 rows take 8 / 20 / 126 ms, with oneDNN 13 / 24 / 137 ms,
    and unpacked 38 ms for 32 rows. The model's 49152-wide head takes 4.7, 6.0 and 8.9 ms for 32 rows (fp32: 44 ms
    packed, 71 ms unpacked).

    Quantised weights stay so where `kept_bits` says it (see quantized_linear.py in cpu/ and gpu/), and elsewhere become
    tensors.

    Args:
        weights: the weight, or several of the same inputs, which lie one below the other.
        bias: [out_features], or None.
        dtype: dtype of inputs and outputs. None means that of the weight, which is then a tensor.
        out_dtype: dtype of outputs where the kernel can give it, such as fp32 for sums. None means `dtype`.
    """
    pieces = stack([weights] if isinstance(weights, Tensor | QuantizedWeight | Fp8Weight) else weights)
    if any(on_gpu(piece) for piece in pieces if not isinstance(piece, Tensor)):
        from lora_kernels.gpu.quantized_linear import DeviceLinear

        return DeviceLinear(pieces, bias, dtype or torch.bfloat16)
    quantized = [piece for piece in pieces if isinstance(piece, QuantizedWeight)]
    if quantized and len(quantized) == len(pieces) and can_keep(quantized[0], dtype):
        from lora_kernels.cpu.quantized_linear import QuantizedLinear

        return QuantizedLinear(quantized, bias, dtype or torch.float32, out_dtype)
    if len(pieces) == 1 and _stays_bf16(pieces[0], dtype):
        from lora_kernels.cpu.numba_dense import DenseLinear

        return DenseLinear(dense(pieces[0]), bias)
    tensors = [dense(piece, dtype) for piece in pieces]
    return _make_dense(tensors[0] if len(tensors) == 1 else torch.cat(tensors), bias, out_dtype)


def make_embedding(weight: Weight, head: Linear, dtype: torch.dtype, *, tied: bool) -> Embedding:
    """Returns the embedding of a weight [vocab_size, hidden_size], with rows in `dtype`. Where `tied` says that `head`
    has the same weight and both are quantised, they share its memory. A CPU keeps a weight in bf16 as it is."""
    if isinstance(weight, QuantizedWeight) and weight.order is None and can_keep(weight, dtype):
        if on_gpu(weight):
            from lora_kernels.gpu.quantized_linear import make_device_embedding

            return make_device_embedding(weight, cast("DeviceLinear", head) if tied else None, dtype)
        from lora_kernels.cpu.quantized_linear import Panels, QuantizedEmbedding

        shared = quantized_form(head) if tied else None
        return QuantizedEmbedding(shared.panels[0] if shared else Panels(weight), dtype)
    rows = dense(weight)
    if dtype != torch.bfloat16 and rows.dtype == torch.bfloat16 and rows.device.type == "cpu":
        return partial(_converted_rows, rows.clone(), dtype)
    rows = rows.to(dtype)
    return lambda token_ids, out=None: torch.index_select(rows, 0, token_ids, out=out)


def _converted_rows(rows: Tensor, dtype: torch.dtype, token_ids: Tensor, out: Tensor | None = None) -> Tensor:
    found = torch.index_select(rows, 0, token_ids)
    return found.to(dtype) if out is None else out.copy_(found)


def on_gpu(weight: QuantizedWeight | Fp8Weight) -> bool:
    return weight.device.type == "cuda"


def can_keep(weight: QuantizedWeight, dtype: torch.dtype | None) -> bool:
    """Returns whether the device of a quantised weight computes with its codes as they are, for inputs in `dtype`."""
    return kept_bits(weight.coding, weight.device, dtype) is not None


def kept_bits(coding: AnyCoding, device: torch.device, dtype: torch.dtype | None) -> float | None:
    """Returns the bits of a device's memory that each number of a quantised weight takes if the device computes with
    its codes as they are, for inputs in `dtype`. None means that the weight is dequantised. A CPU with numba keeps
    codes of integers. A GPU keeps most of these if `dtype` has 16 bits, and FP8 where `multiplies_fp8` is True."""
    if not isinstance(coding, Coding):
        return coding.bits_per_weight if multiplies_fp8(device, dtype) else None
    if device.type == "cpu":
        return coding.bits_per_weight if find_spec("numba") else None
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    from lora_kernels.gpu.quantized_weights import stored_bits  # a machine without CUDA may have no triton

    return stored_bits(coding)


@cache
def packed_bits(device: torch.device, dtype: torch.dtype, *, is_bf16: bool) -> int | None:
    """Returns the bits of memory that each number of a weight takes in the copy that a linear layer on a CPU makes of a
    weight that is a tensor. None means that the layer computes with the tensor itself.

    Args:
        dtype: dtype of inputs and outputs.
        is_bf16: whether all numbers of the weight are bf16's.
    """
    if device.type != "cpu":
        return None
    if find_spec("numba"):
        from lora_kernels.cpu.numba_dense import computes_fp32
        from lora_kernels.cpu.numba_gemm import can_pack

        if can_pack(torch.empty(0, 2, dtype=dtype)):
            return 16
        if dtype == torch.float32 and computes_fp32():
            return 16 if is_bf16 else 32
    return 8 * dtype.itemsize


def embedding_bits(device: torch.device, dtype: torch.dtype, *, is_bf16: bool) -> int:
    """Returns the bits of memory that each number of an embedding takes if its weight is a tensor. The arguments are
    those of `packed_bits`."""
    return 16 if is_bf16 and device.type == "cpu" else 8 * dtype.itemsize


def multiplies_fp8(device: torch.device, dtype: torch.dtype | None) -> bool:
    """Returns whether torch can multiply in FP8 on a device with results in `dtype`: on GPUs of compute capability 8.9
    and up, in bf16."""
    return device.type == "cuda" and dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) >= (8, 9)


def quantized_form(linear: Linear) -> QuantizedLinear | None:
    """Returns the layer if its weight is quantised, else None."""
    if not find_spec("numba"):
        return None
    from lora_kernels.cpu.quantized_linear import QuantizedLinear

    return linear if isinstance(linear, QuantizedLinear) else None


def _stays_bf16(weight: Weight, dtype: torch.dtype | None) -> bool:
    """Returns whether a layer with inputs in `dtype` is to pack a bf16 weight directly. An fp32 copy would take
    twice the weight's memory, and would have to be compared with bf16 before it is packed as bf16 again."""
    if not (isinstance(weight, Tensor) and weight.device.type == "cpu" and weight.dtype == torch.bfloat16):
        return False
    if dtype != torch.float32 or not find_spec("numba"):
        return False
    from lora_kernels.cpu.numba_dense import computes_fp32

    return computes_fp32()


def _make_dense(weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Linear:
    if weight.device.type == "cpu" and find_spec("numba"):
        # Imported late because a few platforms have no numba.
        from lora_kernels.cpu.numba_dense import DenseLinear, computes_fp32
        from lora_kernels.cpu.numba_gemm import PackedLinear, can_pack

        if can_pack(weight):
            return PackedLinear(weight, bias, out_dtype or weight.dtype)
        if weight.dtype == torch.float32 and computes_fp32():
            return DenseLinear(weight, bias)
    if weight.device.type == "cpu" and _can_pack(weight.dtype):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    # On a CPU the tensor may be mapped from the checkpoint's file.
    kept = weight.clone() if weight.device.type == "cpu" else weight
    return lambda x: F.linear(x, kept, bias)


def _can_pack(dtype: torch.dtype) -> bool:
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
