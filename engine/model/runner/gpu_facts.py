"""Finds a GPU's peak speeds and free memory from what the CUDA driver reports."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from engine.sizing import Gpu

TENSOR_FLOP = {
    (7, 0): 1024, (7, 5): 1024, (8, 0): 2048, (8, 6): 1024, (8, 9): 1024, (9, 0): 4096, (10, 0): 8192, (10, 3): 8192,
    (12, 0): 1024, (12, 1): 1024,
}  # fmt: skip
"""Compute capability -> operations that the tensor cores of a multiprocessor do in a clock, in dense products of 16-bit
matrices that are summed in float32. From NVIDIA's white papers of the architectures Volta to Blackwell; for example
A100: 108 multiprocessors x 2,048 x 1.41 GHz = 312 TFLOP/s, H100 SXM: 132 x 4,096 x 1.83 GHz = 989."""
HALF_RATE = ("GeForce", "A10G")
"""Names of GPUs whose tensor cores sum in float32 at half the rate of others of their compute capability: the white
paper of GA102, table 3, and Amazon's 70 TFLOP/s for an A10G."""
FLOAT_FLOP = {(7, 0): 128, (7, 5): 128, (8, 0): 128}
"""Compute capability -> operations that a multiprocessor does in a clock in float32, which torch by default does not
compute on tensor cores: two on each of 64 cores. Other capabilities have 128 cores."""
ASSUMED_BALANCE = 300.0
"""Operations in 16 bits for each byte of memory bandwidth, assumed if the driver reports no memory clock: an A100 has
153, an H100 295 and an L4 400."""
LISTED_GPUS = Path("/proc/driver/nvidia/gpus")


class Properties(Protocol):
    """The properties of a GPU that `torch.cuda.get_device_properties` returns and this module uses. Clocks are in kHz,
    and the width of the memory bus in bits."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    clock_rate: int
    memory_clock_rate: int
    memory_bus_width: int


def find_gpu(device: torch.device, dtype: torch.dtype) -> Gpu:
    """Return a CUDA device's memory bandwidth in bytes per second, its FLOP per second in products of `dtype`, and its
    memory in bytes that is free now."""
    return describe(torch.cuda.get_device_properties(device), torch.cuda.mem_get_info(device)[0], dtype.itemsize)


def describe(found: Properties, free_bytes: int, itemsize: int) -> Gpu:
    """Return the memory bandwidth of a GPU with these properties, and its FLOP per second in products of weights of
    `itemsize` bytes. What is not known is assumed, and `Gpu.assumed` says so."""
    capability, assumed = (found.major, found.minor), []
    known = max((key for key in TENSOR_FLOP if key <= capability), default=min(TENSOR_FLOP))
    if known != capability:
        assumed.append(f"compute capability {found.major}.{found.minor} is assumed to be like {known[0]}.{known[1]}")
    flop = TENSOR_FLOP[known] if itemsize <= 2 else FLOAT_FLOP.get(known, 256)
    if itemsize <= 2 and any(name in found.name for name in HALF_RATE):
        flop //= 2
    flop_per_s = found.multi_processor_count * flop * found.clock_rate * 1e3
    bytes_per_s = 2 * found.memory_clock_rate * 1e3 * found.memory_bus_width / 8  # two transfers a clock
    if not bytes_per_s:
        bytes_per_s = flop_per_s / ASSUMED_BALANCE * (2 / itemsize)
        assumed.append("the driver reports no memory clock, so that the bandwidth is assumed")
    return Gpu(found.name, free_bytes, bytes_per_s, flop_per_s, "; ".join(assumed))


def count_gpus(listed: Path = LISTED_GPUS) -> int:
    """Return the number of NVIDIA GPUs of this machine or container, at least 1, including those that this process does
    not see: engines on them may share the host memory."""
    return max(1, len(list(listed.iterdir())) if listed.is_dir() else torch.cuda.device_count())
