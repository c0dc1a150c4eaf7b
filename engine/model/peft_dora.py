"""DoRA's magnitudes, in the form in which kernels apply them (lora_kernels/dora.py).

PEFT normalises by the rows of W + s B A in every forward pass, as training needs it. Neither changes while an adapter
is served, so it is done once, in fp32, when the adapter is loaded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.model.spec import ModelSpec
from engine.model.weights import WeightSource, parameter_shapes

Block = tuple[Tensor, Tensor]
"""A fp32 [rank, in_features], B fp32 [out_features, rank]."""
BaseLinears = Callable[[str], tuple[Tensor, Tensor | None]]
"""Path of a projection -> its weight [out_features, in_features], and its bias [out_features] or None; both fp32."""


def base_linears(spec: ModelSpec, source: WeightSource) -> BaseLinears:
    """The projections of a model folder, each read when it is asked for."""
    known = parameter_shapes(spec)

    def read(module: str) -> tuple[Tensor, Tensor | None]:
        bias = f"{module}.bias"
        return _fp32(source(f"{module}.weight")), _fp32(source(bias)) if bias in known else None

    return read


def fold_magnitude(block: Block, magnitude: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Block, Tensor]:
    """The block with g = magnitude / ||W + B A|| folded into B, and the scale tile that does the same to the base.

    Args:
        block: B times the LoRA scale already.
        magnitude: fp32 [out_features].

    Returns:
        Block, and fp32 [2, out_features]: g - 1, and what keeps the bias out of it. Infinite or NaN where a norm is 0.
    """
    a, b = block
    norm = torch.linalg.vector_norm(weight + b @ a, dim=1)
    scale = (magnitude - norm) / norm
    shift = torch.zeros_like(scale) if bias is None else -scale * bias
    return (a, (magnitude / norm)[:, None] * b), torch.stack((scale, shift))


def _fp32(tensor: Tensor) -> Tensor:
    return tensor.to(device="cpu", dtype=torch.float32)
