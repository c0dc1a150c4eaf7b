"""The backend that is measured: what an engine on the device has."""

from __future__ import annotations

import torch

from benchmarks.gpu.shapes import model_dtype, model_spec
from lora_kernels.backend import Backend
from lora_kernels.select import select_backend
from lora_kernels.triton_backend import TritonBackend


def our_backend(device: torch.device) -> Backend:
    """On a CPU the same kernels, interpreted."""
    if device.type == "cpu":
        return TritonBackend()
    return select_backend(device, model_dtype(tiny=False), head_dim=model_spec(tiny=False).head_dim)
