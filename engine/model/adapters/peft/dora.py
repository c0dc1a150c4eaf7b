"""Converts DoRA's magnitudes to the form in which kernels apply them (lora_kernels/dora.py). The norms of the rows of W
+ s B A, constant while an adapter is served, are computed once, in fp32."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.model.spec.config import ModelSpec
from engine.model.weights.reader import WeightSource, parameter_shapes
from lora_kernels.quantized import Weight, dense

Block = tuple[Tensor, Tensor]
"""A and B of one projection: fp32 [rank, in_features] and fp32 [out_features, rank]."""
BaseLinears = Callable[[str], tuple[Weight, Tensor | None]]
"""Maps a projection's path to its weight [out_features, in_features], as it is stored, and bias [out_features] or
None."""


def base_linears(spec: ModelSpec, source: WeightSource) -> BaseLinears:
    """Return a function that reads the weight and bias of a projection of the base model, by its path, from `source` at
    each call. DoRA needs them for its norms."""
    names = {spec.stored_name(name): name for name in parameter_shapes(spec)}

    def read(module: str) -> tuple[Weight, Tensor | None]:
        bias = names.get(f"{module}.bias")
        return source(names[f"{module}.weight"]), None if bias is None else dense(source(bias))

    return read


def fold_magnitude(block: Block, magnitude: Tensor, weight: Weight, bias: Tensor | None) -> tuple[Block, Tensor]:
    """Fold DoRA's g = `magnitude` / ||W + B A|| into B. Return the folded block, and the scale tile, fp32 [2,
    out_features]: g minus 1, and the shift that keeps the bias unscaled. Values are not finite where a norm is 0."""
    a, b = block
    norm = torch.linalg.vector_norm(fp32(dense(weight)) + b @ a, dim=1)
    scale = (magnitude - norm) / norm
    shift = torch.zeros_like(scale) if bias is None else -scale * fp32(bias)
    return (a, (magnitude / norm)[:, None] * b), torch.stack((scale, shift))


def fp32(tensor: Tensor) -> Tensor:
    """Return a tensor in fp32 on the CPU."""
    return tensor.to(device="cpu", dtype=torch.float32)
