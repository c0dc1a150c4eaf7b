"""Checkpoints in FP8: weights in e4m3, and factors `weight_scale_inv` or `weight_scale` of blocks, outputs or all.
Weights with blocks become tensors. Source: the code of DeepSeek-V3, transformers' finegrained_fp8.py."""

from __future__ import annotations

from functools import partial
from math import prod

from torch import Tensor

from engine.model.checkpoints.layers import Json, Layer, grid_shapes, parts_of
from engine.model.checkpoints.stored import FLOATS, StoredTensors
from lora_kernels.fp8 import FP8, Fp8Weight

FORM, E4M3 = "fp8", "F8_E4M3"
SCALES = ("weight_scale_inv", "weight_scale")
PARTS = ("weight", *SCALES, "weight_zero_point", "input_scale", "input_scale_ub", "output_scale")


class Fp8:
    """Finds the weights of a checkpoint folder that are in FP8 (e4m3), with one scale for the tensor, for each output,
    or for each block."""

    def __init__(self, section: Json, stored: StoredTensors) -> None:
        self._stored, self._block = stored, section.get("weight_block_size")

    def find(self, module: str, shape: tuple[int, int]) -> Layer | None:
        if self._stored.dtype(f"{module}.weight") != E4M3:
            return None
        if self._block:
            return fp8_layer(self._stored, module, shape, (self._block[0], self._block[1]))
        scale = next((name for part in SCALES if (name := f"{module}.{part}") in self._stored), None)
        of_channels = scale is not None and prod(self._stored[scale].shape) > 1
        return fp8_layer(self._stored, module, shape, (1 if of_channels else shape[0], shape[1]))


def fp8_layer(stored: StoredTensors, module: str, shape: tuple[int, int], block: tuple[int, int]) -> Layer:
    """Return how the FP8 weight of a module is stored and read. Blocks of [outputs, inputs] of it share a scale. Raises
    WeightsError if its scales are missing or have another shape."""
    grid = -(-shape[0] // block[0]), -(-shape[1] // block[1])
    scale = next((name for part in SCALES if (name := f"{module}.{part}") in stored), f"{module}.{SCALES[1]}")
    stored.require(f"{module}.weight", (E4M3,), shape)
    stored.require(scale, (*FLOATS, "F8_E8M0"), *grid_shapes(*grid))
    by_outputs = block[1] >= shape[1] and block[0] in (1, shape[0])
    read = partial(_read if by_outputs else _read_blocks, stored, f"{module}.weight", scale, block, grid)
    return Layer(FORM, parts_of(module, stored, PARTS), FP8 if by_outputs else None, read)


def _read(stored: StoredTensors, name: str, scale: str, block: tuple[int, int], grid: tuple[int, int]) -> Fp8Weight:
    numbers = stored.read(name)
    return Fp8Weight(numbers, stored.read(scale).float().view(-1).expand(len(numbers)).contiguous())


def _read_blocks(stored: StoredTensors, name: str, scale: str, block: tuple[int, int], grid: tuple[int, int]) -> Tensor:
    weight = stored.read(name).float()
    factors = stored.read(scale).float().view(grid).repeat_interleave(block[1], dim=1)[:, : weight.shape[1]]
    return weight.mul_(factors.repeat_interleave(block[0], dim=0)[: len(weight)])
