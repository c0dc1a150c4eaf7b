"""Who answers the calls of `Backend`, chosen once; and who scales base outputs where adapters ask for it."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from lora_kernels import dora
from lora_kernels.backend import Backend
from lora_kernels.layout import LoraTable
from lora_kernels.segments import SegmentPlan
from lora_kernels.torch_ops import TorchBackend


def select_backend(
    device: torch.device,
    dtype: torch.dtype,
    on_kernel: Callable[[int, int], None] = lambda *_: None,
    head_dim: int = 128,
    data_dir: Path | None = None,
) -> Backend:
    """Triton on CUDA, numba on a CPU, and vectorised torch where there is no numba. Its `name` says which.

    Args:
        dtype, head_dim: the model's.
        on_kernel: told how many of how many kernels are compiled, where that is done now: about ten seconds, once.
        data_dir: where what was tuned on this machine is kept; None: nowhere.

    Raises:
        TuningError: what is kept there, or shipped, cannot be used; the message names the file.
    """
    # Imported here: a machine without CUDA may have no triton, and few platforms have neither numba.
    if device.type == "cuda":
        from lora_kernels.triton_tuned import load_backend

        return load_backend(device, dtype, head_dim, data_dir)
    if device.type == "cpu" and find_spec("numba"):
        from lora_kernels.numba_backend import NumbaBackend

        backend = NumbaBackend()
        backend.compile(dtype, on_kernel)
        return backend
    return TorchBackend()


def prepare_scales(arena: Tensor, table: LoraTable, plan: SegmentPlan) -> dora.BaseScales | None:
    """Once a step: how its DoRA adapters scale base outputs. None when there are none."""
    if arena.is_cuda:
        from lora_kernels import triton_dora

        return triton_dora.prepare(arena, table, plan)
    return dora.prepare(arena, table, plan)
