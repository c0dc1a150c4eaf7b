"""A linear layer of quantised weights on a GPU, and the embedding that shares its memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lora_kernels.gpu.launch import with_constants
from lora_kernels.gpu.quantized_weights import DeviceWeight, pack, stored_bits
from lora_kernels.gpu.triton_quantized import product_kernel, split_sum_kernel
from lora_kernels.quantized import QuantizedWeight, Weight

LARGEST_TILED = 256
"""Most rows that `product_kernel` computes. For more, dequantising a weight costs less than the products gain by
cuBLAS: an estimate, as no GPU has measured it."""
SCRATCH_BYTES = 64 << 20
"""Bytes of a weight that are dequantised at a time, which is what captured steps with many rows need besides. Most of
them stay in the L2 of a large GPU until cuBLAS reads them."""
PROGRAMS = 264
"""Programs that fill a GPU: two for each multiprocessor of an H100 or H200. The inputs are split until there are as
many."""
MOST_SPLITS = 4
BLOCK_N, SUM_BLOCK = 128, 1024
LEAST_ROWS, MOST_ROWS = 16, 64
"""Rows of the lowest and the highest tile."""


class DeviceLinear:
    """A linear layer, [num_rows, in_features] -> [num_rows, out_features], whose weight is quantised at least in part.

    Its launches depend on the number of rows only, so that they can be captured in a CUDA graph. A row has the same
    bits among up to `LARGEST_TILED` rows; cuBLAS multiplies more.

    Args:
        weights: pieces of the weight, one below the other, on the GPU. Pieces of codings that a GPU cannot compute with
            are dequantised.
        bias: [out_features], or None.
        dtype: bf16 or fp16, of inputs and outputs.
    """

    def __init__(self, weights: Sequence[Weight], bias: Tensor | None, dtype: torch.dtype) -> None:
        self._features = sum(weight.shape[0] for weight in weights)
        biases = [None] * len(weights) if bias is None else bias.split([weight.shape[0] for weight in weights])
        self.parts = [_make_part(weight, part, dtype) for weight, part in zip(weights, biases, strict=True)]

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the output, a new tensor."""
        x = x.contiguous()
        out = x.new_empty(len(x), self._features)
        start = 0
        for part in self.parts if len(x) else ():
            part.multiply(x, out[:, start : start + part.features])
            start += part.features
        return out


class QuantizedPart:
    """The outputs of one quantised piece of a weight. `bias` is [features], or None."""

    def __init__(self, weight: DeviceWeight, bias: Tensor | None) -> None:
        self.weight, self.features, self._bias = weight, weight.features, bias
        tiles = -(-weight.features // BLOCK_N)
        self._splits = max(1, min(MOST_SPLITS, PROGRAMS // tiles, len(weight.words)))

    def multiply(self, x: Tensor, out: Tensor) -> None:
        """Writes the outputs of `x`, contiguous [num_rows, width], to `out`, [num_rows, features]."""
        if self.weight.order is not None:
            x = x.index_select(1, self.weight.order)
        if len(x) > LARGEST_TILED:
            self._multiply_dense(x, out)
        elif self._splits == 1:
            self._launch(x, out, out.stride(0))
        else:
            sums = torch.empty(self._splits * len(x), self.features, dtype=torch.float32, device=x.device)
            self._launch(x, sums, self.features)
            self._add_up(sums, out)

    def _launch(self, x: Tensor, out: Tensor, stride: int) -> None:
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
        grid = -(-self.features // BLOCK_N) * -(-rows // height), self._splits
        sizes = (rows, self.features, weight.width, len(weight.words), x.stride(0), stride)
        kernel(grid, x, *weight.tensors, bias, out, *sizes)

    def _add_up(self, sums: Tensor, out: Tensor) -> None:
        kernel = with_constants(
            split_sum_kernel, HAS_BIAS=self._bias is not None, SPLITS=self._splits, BLOCK=SUM_BLOCK, num_warps=4
        )
        bias, grid = sums if self._bias is None else self._bias, (len(out), -(-self.features // SUM_BLOCK))
        kernel(grid, sums, bias, out, len(out), self.features, out.stride(0))

    def _multiply_dense(self, x: Tensor, out: Tensor) -> None:
        step = max(BLOCK_N, SCRATCH_BYTES // (self.weight.width * x.element_size()) // BLOCK_N * BLOCK_N)
        for first in range(0, self.features, step):
            count = min(step, self.features - first)
            bias = None if self._bias is None else self._bias[first : first + count]
            DensePart(self.weight.dequantize(first, count, x.dtype), bias).multiply(x, out[:, first : first + count])


class DensePart:
    """The outputs of a piece of a weight that is a tensor, [features, width]. `bias` is [features], or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.features, self._weight, self._bias = len(weight), weight, bias

    def multiply(self, x: Tensor, out: Tensor) -> None:
        """Writes the outputs of `x`, [num_rows, width], to `out`, [num_rows, features]."""
        if self._bias is None:
            torch.mm(x, self._weight.T, out=out)
        else:
            torch.addmm(self._bias, x, self._weight.T, out=out)


class DeviceEmbedding:
    """Looks up rows, in `dtype`, of a packed weight [vocab_size, hidden_size], which may be that of the head."""

    def __init__(self, weight: DeviceWeight, dtype: torch.dtype) -> None:
        self.weight, self._dtype = weight, dtype

    def __call__(self, token_ids: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns the rows [num_rows, hidden_size] that `token_ids` (integers [num_rows]) name: in `out`, if it is
        given."""
        if out is None:
            out = torch.empty(len(token_ids), self.weight.width, dtype=self._dtype, device=token_ids.device)
        return self.weight.rows(token_ids.contiguous(), out)


def make_device_embedding(weight: QuantizedWeight, head: DeviceLinear | None, dtype: torch.dtype) -> DeviceEmbedding:
    """Returns the embedding of a weight, which shares the memory of `head` if that has the same weight."""
    part = head.parts[0] if head else None
    return DeviceEmbedding(part.weight if isinstance(part, QuantizedPart) else pack(weight), dtype)


def launch_options(height: int) -> dict[str, int]:
    """Returns the launch options of `product_kernel` for tiles of `height` rows. All have as many warps as Hopper's
    instruction (wgmma) needs, so that a row has the same bits in each."""
    return {"num_warps": 4, "num_stages": 5 if height < MOST_ROWS else 4}


def _make_part(weight: Weight, bias: Tensor | None, dtype: torch.dtype) -> QuantizedPart | DensePart:
    if isinstance(weight, Tensor):
        return DensePart(weight.to(dtype), bias)
    if stored_bits(weight.coding) is None:
        return DensePart(weight.dequantize(dtype), bias)
    return QuantizedPart(pack(weight), bias)
