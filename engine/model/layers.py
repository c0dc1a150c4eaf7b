"""The parts of a decoder layer that have nothing to do with attention or adapters."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis: normalised in fp32, rounded to the dtype of `x`, then scaled, in that order."""
    return F.rms_norm(x, (x.shape[-1],), None, eps) * weight


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, with `gate_up` [num_rows, 2 * width] holding gate and up side by side."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
