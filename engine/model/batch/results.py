"""Blocks of host memory that alternate, so that no step allocates any, for the results of steps: kernels store them
there, or they are copied from the device."""

from __future__ import annotations

from itertools import cycle

import torch
from torch import Tensor

from lora_kernels.pinned import pinned_zeros

BLOCKS = 4
"""Number of blocks. At most two are in use: that of the step that the host waits for, and that of the step planned
ahead."""
ALIGNMENT = 16
"""Alignment of results in a block, in bytes."""


class ResultBlocks:
    """A ring of BLOCKS host blocks of `num_bytes` each, for the results of steps. They are pinned if `device` is a GPU,
    whose kernels may store results there."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        count = BLOCKS * size
        memory = pinned_zeros(count, torch.uint8) if device.type == "cuda" else torch.zeros(count, dtype=torch.uint8)
        self._blocks = cycle([_Block(part) for part in memory.view(BLOCKS, size)])

    def begin(self) -> StepResults:
        """Take the ring's oldest block for the results of a step. What it held must not be read any more."""
        return StepResults(next(self._blocks))


class _Block:
    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.turn = 0
        """Number of steps that have used the block."""


class StepResults:
    """The results of one step, in its block of a `ResultBlocks` ring."""

    def __init__(self, block: _Block) -> None:
        block.turn += 1
        self._block, self._turn, self._used = block, block.turn, 0

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """Take room in the step's block on the host, in which a kernel stores results. Return a tensor [count]. Raises
        ValueError if the block has too little room."""
        room = self._room(count * dtype.itemsize)
        if room is None:
            raise ValueError(f"a block of {len(self._block.memory)} bytes has no room for {count} numbers of {dtype}")
        return room.view(dtype)

    def download(self, tensor: Tensor) -> Tensor:
        """Start a copy of a contiguous tensor from the device to the step's block on the host, and return the host
        tensor. Only if the block has too little room does it wait for the copy."""
        room = self._room(tensor.nbytes)
        if room is None:
            return tensor.cpu()
        return room.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)

    def _room(self, num_bytes: int) -> Tensor | None:
        """Take bytes of the block, uint8 [num_bytes]. None means that the block has too little room."""
        start, end = self._used, self._used + num_bytes
        if end > len(self._block.memory):
            return None
        self._used = -(-end // ALIGNMENT) * ALIGNMENT
        return self._block.memory[start:end]

    def check(self) -> None:
        """Raises RuntimeError if a later step has taken the step's block: the tensors that `take` and `download`
        returned then hold the results of that step."""
        if self._block.turn != self._turn:
            raise RuntimeError(f"a step's results are read after {BLOCKS} later steps have begun")
