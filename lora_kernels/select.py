"""Who answers the calls of `Backend`, chosen once; and who scales base outputs where adapters ask for it."""

from __future__ import annotations

import torch
from torch import Tensor

from lora_kernels import dora
from lora_kernels.backend import Backend
from lora_kernels.layout import LoraTable
from lora_kernels.segments import SegmentPlan
from lora_kernels.torch_ops import TorchBackend


def select_backend(device: torch.device) -> Backend:
    """Triton on CUDA, vectorised torch everywhere else."""
    if device.type == "cuda":
        # Imported here: a machine without CUDA may have no triton.
        from lora_kernels.triton_backend import TritonBackend

        return TritonBackend()
    return TorchBackend()


def prepare_scales(arena: Tensor, table: LoraTable, plan: SegmentPlan) -> dora.BaseScales | None:
    """Once a step: how its DoRA adapters scale base outputs. None when there are none."""
    if arena.is_cuda:
        from lora_kernels import triton_dora

        return triton_dora.prepare(arena, table, plan)
    return dora.prepare(arena, table, plan)
