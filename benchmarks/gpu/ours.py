"""Our side of every comparison: the backend that an engine on the device uses."""

from __future__ import annotations

import torch

from benchmarks.gpu.shapes import model_dtype, model_spec
from lora_kernels.backend import Backend
from lora_kernels.gpu.triton_backend import TritonBackend
from lora_kernels.select import select_backend


def our_backend(device: torch.device, fp8_kv: bool = False) -> Backend:
    """Return our kernels for a device: what an engine, with K and V in FP8 or not, selects on a GPU, or Triton's in its
    interpreter on a CPU."""
    if device.type == "cpu":
        return TritonBackend()
    return select_backend(device, model_dtype(tiny=False), head_dim=model_spec(tiny=False).head_dim, fp8_kv=fp8_kv)
