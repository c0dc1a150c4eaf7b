"""Memory in pages of 2 MiB, for weights that every step reads from beginning to end."""

from __future__ import annotations

import math
import mmap
from contextlib import suppress

import torch
from torch import Tensor

PAGE = 2 << 20


def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return a CPU tensor of zeros, in huge pages where it fills any and Linux gives them on request."""
    # With pages of 4 KiB, a step of 16 rows of experts took 20 to 40 % longer on two Zen 3 cores.
    size = math.prod(shape) * dtype.itemsize
    if size < PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(*shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # from a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
