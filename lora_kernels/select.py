"""Selects the implementation of `Backend` for a device, and the implementation of DoRA's scaling of base outputs."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from lora_kernels import dora
from lora_kernels.backend import Backend
from lora_kernels.layout import LoraTable
from lora_kernels.reference import ReferenceBackend
from lora_kernels.segments import SegmentPlan


def select_backend(
    device: torch.device,
    dtype: torch.dtype,
    on_kernel: Callable[[int, int], None] = lambda *_: None,
    head_dim: int = 128,
    data_dir: Path | None = None,
    fp8_kv: bool = False,
    sums: bool = False,
    experts: bool = False,
) -> Backend:
    """Return the Triton backend on CUDA, otherwise the numba backend. Raises ValueError if triton is not installed, and
    TuningError, which names the file, for a bad tuning.

    Args:
        on_kernel: called with the number of kernels compiled so far and their total; only numba compiles during this
            call.
        data_dir: directory of GPU tunings measured on this machine, or None.
        fp8_kv: whether K and V are stored in FP8, which only a GPU reads.
        sums: whether deltas are added to outputs in fp32, which ranks sum.
        experts: whether the model has experts.
    """
    # Imported late: a machine without CUDA may have no triton, and the measurements on GPUs hide numba.
    if device.type == "cuda":
        if not find_spec("triton"):
            raise ValueError("a GPU needs triton: pip install 'loralane[gpu]'")
        from lora_kernels.gpu.triton_tuned import load_backend

        return load_backend(device, dtype, head_dim, data_dir, fp8_kv)
    if not find_spec("numba"):  # every installation has it; the suite for GPUs in toy size hides it
        return ReferenceBackend()
    from lora_kernels.cpu.numba_backend import NumbaBackend

    backend = NumbaBackend()
    backend.compile(dtype, on_kernel, sums=sums, experts=experts)
    return backend


def prepare_scales(arena: Tensor, table: LoraTable, plan: SegmentPlan) -> dora.BaseScales | None:
    """Return the object that scales base outputs for the DoRA adapters of one step, in Triton if the arena is on a GPU,
    otherwise in torch. None means that no adapter of the step scales any."""
    if arena.is_cuda:
        from lora_kernels.gpu import triton_dora

        return triton_dora.prepare(arena, table, plan)
    return dora.prepare(arena, table, plan)
