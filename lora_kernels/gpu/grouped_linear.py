"""The linears of a layer's experts on a GPU, computed in one launch."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
from torch import Tensor

from lora_kernels.gpu.grouped_tuning import SHIPPED, GroupedTuning
from lora_kernels.gpu.launch import with_constants
from lora_kernels.gpu.triton_grouped import SIDE_BY_SIDE, grouped_kernel


class DeviceExperts:
    """A `GroupedLinear` of `count` plain weights [out_features, in_features] on the GPU. Its launch depends only on the
    number of entries, so that it can be captured.

    Args:
        out_dtype: None means that of weights.
        biases: [count, out_features], or None.
    """

    def __init__(
        self,
        weights: Iterable[Tensor],
        count: int,
        out_dtype: torch.dtype | None = None,
        biases: Tensor | None = None,
    ) -> None:
        experts = iter(weights)
        first = next(experts)
        # Filled one by one, so that no more than one expert's weight is in memory twice.
        self.weight = first.new_empty(count, *first.shape)
        self.weight[0] = first
        for number, weight in enumerate(experts, 1):
            self.weight[number] = weight
        self._out_dtype = out_dtype or first.dtype
        self._biases = biases

    def __call__(self, x: Tensor, starts: Tensor, tuning: GroupedTuning = SHIPPED) -> Tensor:
        """Return each entry's output of its own expert's linear, a new tensor: see `GroupedLinear`."""
        count, features, width = self.weight.shape
        out = x.new_empty(len(x), features, dtype=self._out_dtype)
        if len(x):
            tile = tuning.tile(len(x), count)
            constants = {**expert_constants(count), "FEATURES": features, "WIDTH": width, **tile.constants}
            kernel = with_constants(grouped_kernel, HAS_BIASES=self._biases is not None, **constants)
            grid = num_programs(len(x), count, features, tile.block_m, tile.block_n)
            kernel(
                grid, x, self.weight, starts, out, self.weight if self._biases is None else self._biases, x.stride(0)
            )
        return out


def expert_constants(count: int) -> dict[str, int]:
    return {"EXPERTS": count, "EXPERT_BLOCK": triton.next_power_of_2(count)}


def num_programs(entries: int, experts: int, features: int, block_m: int, block_n: int) -> tuple[int]:
    """Return the grid of `grouped_kernel`: a program for each block of outputs of each tile, for the largest possible
    number of tiles, in which each expert has one tile that is not full."""
    tiles = min(experts, entries) + entries // block_m
    side = SIDE_BY_SIDE.value
    return (-(-tiles // side) * side * -(-features // block_n),)
