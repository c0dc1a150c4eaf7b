"""A linear layer of quantised weights on a GPU, and the embedding that shares its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lora_kernels.fp8 import Fp8Weight
from lora_kernels.gpu.fp8_linear import Fp8Part, can_multiply
from lora_kernels.gpu.int8_linear import Int8Part, has_integer_products
from lora_kernels.gpu.launch import with_constants
from lora_kernels.gpu.quantized_weights import DeviceWeight, pack, stored_bits
from lora_kernels.gpu.triton_quantized import product_kernel, split_sum_kernel
from lora_kernels.quantized import QuantizedWeight, Weight, dense

LARGEST_TILED = 256
"""Most rows that `product_kernel` computes. For more, the weight is dequantised for cuBLAS, whose products are then so
much faster that this pays: an estimate, as no GPU has measured it."""
SCRATCH_BYTES = 64 << 20
"""Bytes of a weight that are dequantised at a time, into memory that captured steps with many rows need besides their
outputs. Most of them stay in the L2 of a large GPU until cuBLAS reads them."""
PROGRAMS = 264
"""Programs that fill a GPU: two for each multiprocessor of an H100 or H200. The inputs are split until there are as
many."""
MOST_SPLITS = 4
BLOCK_N, SUM_BLOCK = 128, 1024
LEAST_ROWS, MOST_ROWS = 16, 64
"""Minimum and maximum number of rows of a tile, which is a power of two."""


Part = Callable[[Tensor], Tensor]
"""Computes the outputs [num_rows, features] of a piece of a weight from [num_rows, in_features], contiguous."""


class DeviceLinear:
    """A linear layer, [num_rows, in_features] -> [num_rows, out_features], at least partly quantised, whose launches
    can be captured in a CUDA graph. Up to `LARGEST_TILED` rows, a row's bits do not depend on others.

    Args:
        weights: pieces, one below the other, on the GPU; dequantised if their coding is not supported.
        dtype: bf16 or fp16, of inputs and outputs; bf16 with FP8.
    """

    def __init__(self, weights: Sequence[Weight], bias: Tensor | None, dtype: torch.dtype) -> None:
        biases = [None] * len(weights) if bias is None else bias.split([weight.shape[0] for weight in weights])
        self.parts = [_make_part(weight, part, dtype) for weight, part in zip(weights, biases, strict=True)]

    def __call__(self, x: Tensor) -> Tensor:
        """Return the output, a new tensor."""
        x = x.contiguous()
        if len(self.parts) == 1:
            return self.parts[0](x)
        return torch.cat([part(x) for part in self.parts], dim=1)


class QuantizedPart:
    """The linear layer of one piece of a weight whose codes are integers. `bias` is [features], or None."""

    def __init__(self, weight: DeviceWeight, bias: Tensor | None) -> None:
        self.weight, self._bias = weight, bias
        tiles = -(-weight.features // BLOCK_N)
        self._splits = max(1, min(MOST_SPLITS, PROGRAMS // tiles, len(weight.words)))

    def __call__(self, x: Tensor) -> Tensor:
        """Return the outputs, [num_rows, features], of `x`, contiguous [num_rows, width]."""
        weight, out = self.weight, x.new_empty(len(x), self.weight.features)
        if weight.order is not None:
            x = x.index_select(1, weight.order)
        if len(x) > LARGEST_TILED:
            self._multiply_dense(x, out)
        elif len(x) and self._splits == 1:
            self._launch(x, out)
        elif len(x):
            sums = x.new_empty(self._splits * len(x), weight.features, dtype=torch.float32)
            self._launch(x, sums)
            self._add_up(sums, out)
        return out

    def _launch(self, x: Tensor, out: Tensor) -> None:
        weight, rows = self.weight, len(x)
        height = min(MOST_ROWS, max(LEAST_ROWS, 1 << (rows - 1).bit_length()))
        kernel = with_constants(
            product_kernel,
            **weight.constants,
            HAS_BIAS=self._bias is not None,
            SPLITS=self._splits,
            BLOCK_N=BLOCK_N,
            BLOCK_M=height,
            **launch_options(height),
        )
        bias = weight.words if self._bias is None else self._bias
        grid = -(-weight.features // BLOCK_N) * -(-rows // height), self._splits
        sizes = (rows, weight.features, weight.width, len(weight.words), x.stride(0))
        kernel(grid, x, *weight.tensors, bias, out, *sizes)

    def _add_up(self, sums: Tensor, out: Tensor) -> None:
        kernel = with_constants(
            split_sum_kernel, HAS_BIAS=self._bias is not None, SPLITS=self._splits, BLOCK=SUM_BLOCK, num_warps=4
        )
        bias, grid = sums if self._bias is None else self._bias, (len(out), -(-out.shape[1] // SUM_BLOCK))
        kernel(grid, sums, bias, out, len(out), out.shape[1])

    def _multiply_dense(self, x: Tensor, out: Tensor) -> None:
        step = max(BLOCK_N, SCRATCH_BYTES // (self.weight.width * x.element_size()) // BLOCK_N * BLOCK_N)
        for first in range(0, self.weight.features, step):
            piece = slice(first, min(first + step, self.weight.features))
            weight = self.weight.dequantize(first, piece.stop - first, x.dtype)
            if self._bias is None:
                torch.mm(x, weight.T, out=out[:, piece])
            else:
                torch.addmm(self._bias[piece], x, weight.T, out=out[:, piece])


class DeviceEmbedding:
    """Looks up rows, in `dtype`, of a packed weight [vocab_size, hidden_size], which may be that of the head."""

    def __init__(self, weight: DeviceWeight, dtype: torch.dtype) -> None:
        self.weight, self._dtype = weight, dtype

    def __call__(self, token_ids: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the rows [num_rows, hidden_size] that `token_ids` (integers [num_rows]) name: in `out`, if it is
        given."""
        if out is None:
            out = torch.empty(len(token_ids), self.weight.width, dtype=self._dtype, device=token_ids.device)
        return self.weight.rows(token_ids.contiguous(), out)


def make_device_embedding(weight: QuantizedWeight, head: DeviceLinear | None, dtype: torch.dtype) -> DeviceEmbedding:
    """Return the embedding of a weight, which shares the memory of `head` if that has the same weight."""
    part = head.parts[0] if head else None
    return DeviceEmbedding(part.weight if isinstance(part, QuantizedPart) else pack(weight), dtype)


def launch_options(height: int) -> dict[str, int]:
    """Return the launch options of `product_kernel` for tiles of `height` rows. All have as many warps as Hopper's
    instruction (wgmma) needs, so that a row has the same bits in each."""
    return {"num_warps": 4, "num_stages": 5 if height < MOST_ROWS else 4}


def _make_part(weight: Weight, bias: Tensor | None, dtype: torch.dtype) -> Part:
    if isinstance(weight, Fp8Weight) and can_multiply(weight):
        return Fp8Part(weight, bias)
    if isinstance(weight, QuantizedWeight) and has_integer_products(weight):
        return Int8Part(weight, bias)
    if isinstance(weight, QuantizedWeight) and stored_bits(weight.coding) is not None:
        return QuantizedPart(pack(weight), bias)
    return partial(F.linear, weight=dense(weight, dtype), bias=bias)
