"""Who answers the calls of `Backend`, chosen once."""

from __future__ import annotations

import torch

from lora_kernels.backend import Backend
from lora_kernels.torch_ops import TorchBackend


def select_backend(device: torch.device) -> Backend:
    """Triton on CUDA, vectorised torch everywhere else."""
    if device.type == "cuda":
        # Imported here: a machine without CUDA may have no triton.
        from lora_kernels.triton_backend import TritonBackend

        return TritonBackend()
    return TorchBackend()
