"""Who answers the calls of `Backend`, chosen once."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch

from lora_kernels.backend import Backend
from lora_kernels.torch_ops import TorchBackend


def select_backend(
    device: torch.device, dtype: torch.dtype, on_kernel: Callable[[int, int], None] = lambda *_: None
) -> Backend:
    """Triton on CUDA, numba on a CPU, and vectorised torch where there is no numba. Its `name` says which.

    Args:
        dtype: the model's.
        on_kernel: told how many of how many kernels are compiled, where that is done now: about ten seconds, once.
    """
    # Imported here: a machine without CUDA may have no triton, and few platforms have neither numba.
    if device.type == "cuda":
        from lora_kernels.triton_backend import TritonBackend

        return TritonBackend()
    if device.type == "cpu" and find_spec("numba"):
        from lora_kernels.numba_backend import NumbaBackend

        backend = NumbaBackend()
        backend.compile(dtype, on_kernel)
        return backend
    return TorchBackend()
