"""Kernels that were run once, one after the other, run again as one.

Starting a kernel takes 8 us of Python and 2 us of the team. A decoding step of 30 layers starts 300 of them, and 420
with adapters: 4 of its 17 ms with eight rows. On a tape they follow each other in one parallel region, with a barrier
after each. They read and write the memory that they did when they were recorded; what is new in a step is written there
first, and what a step plans for all layers (attention's items, LoRA's tiles) into their argument blocks.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from lora_kernels import simd
from lora_kernels.openmp import TICKETS, Kernel, team

BLOCK_NUMBERS = 32
"""int64 that an argument block may have."""


class TapeBlock(ctypes.Structure):
    """`calls`: int64 [num_calls, 2], a kernel's address and its argument block's; `barrier`: 0 for one thread."""

    _fields_ = [*TICKETS, *((name, ctypes.c_int64) for name in ("num_calls", "calls", "barrier"))]


@dataclass(slots=True)
class _Piece:
    """Of a workspace. `user` is gone when no tensor over it is left."""

    memory: Tensor
    user: Callable[[], Any]

    @property
    def is_free(self) -> bool:
        return self.user() is None


class Workspace:
    """Memory for what kernels give each other, used again as soon as nobody holds a tensor over it.

    Tapes that are played in turn share one. It stays small, and so in the cache.
    """

    def __init__(self) -> None:
        self._pieces: list[_Piece] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        piece = next((piece for piece in self._pieces if len(piece.memory) >= size and piece.is_free), None)
        if piece is None:
            piece = _Piece(torch.empty(size, dtype=torch.uint8), lambda: None)
            self._pieces.append(piece)
        seen = piece.memory[:size].numpy()
        piece.user = weakref.ref(seen)  # which every tensor and view over it holds
        return torch.from_numpy(seen).view(dtype).view(tuple(shape))

    def let_go(self, tensor: Tensor) -> Tensor:
        """The same numbers, until others are written over them."""
        [memory] = [piece.memory for piece in self._pieces if piece.memory.data_ptr() == tensor.data_ptr()]
        return memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


class Tape:
    """Records one pass, and plays it any number of times.

    Nothing but kernels may compute between the first and the last of a pass: what else does is not on the tape.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._team, self._workspace = team(), workspace
        self._addresses: list[int] = []
        self._taken: list[bytes] = []
        self._planned: dict[Hashable, list[int]] = {}
        """Places of the calls that were planned together."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around the pass, which is computed as ever. Once."""
        with self._team.recorded_by(self):
            yield
        count = len(self._taken)
        self._blocks = np.frombuffer(b"".join(self._taken), dtype=np.int64).reshape(count, BLOCK_NUMBERS).copy()
        starts = self._blocks.ctypes.data + self._blocks.strides[0] * np.arange(count)
        self._calls = np.stack([np.asarray(self._addresses, dtype=np.int64), starts], axis=1)
        self._block = TapeBlock(num_calls=count, calls=self._calls.ctypes.data)

    def take(self, kernel: Kernel, block: ctypes.Structure, form: Hashable) -> None:
        """See `Recorder.take`. `of_step` of a planned block's class names the fields that `renew` changes."""
        if form is not None:
            self._planned.setdefault(form, []).append(len(self._taken))
        self._addresses.append(kernel.address)
        self._taken.append(bytes(block).ljust(8 * BLOCK_NUMBERS, b"\0"))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `Recorder.empty`."""
        return self._workspace.empty(shape, dtype)

    @property
    def num_calls(self) -> int:
        return len(self._taken)

    @property
    def forms(self) -> tuple[Any, ...]:
        """What has planned blocks for a whole step: see `Team.run`."""
        return tuple(self._planned)

    def renew(self, form: Hashable, block: ctypes.Structure) -> None:
        """This step's plan. What it points at has to stay where it is until the tape has been played."""
        columns, names = _of_step(type(block))
        self._blocks[np.ix_(self._planned[form], columns)] = [getattr(block, name) for name in names]

    def play(self) -> None:
        self._blocks[:, : len(TICKETS)] = 0
        threads = torch.get_num_threads() if self._team.is_parallel else 1
        self._block.barrier = self._team.barrier if threads > 1 else 0
        self._team.run(_player(), self._block, threads)


@cache
def _of_step(kind: Any) -> tuple[list[int], tuple[str, ...]]:
    """Of an argument block, which int64 a step has planned, and what they are called."""
    return [getattr(kind, name).offset // 8 for name in kind.of_step], kind.of_step


@cache
def _player() -> Kernel:
    def play(pointer):
        block = carray(pointer, 1)[0]
        for place in range(block.calls, block.calls + 16 * block.num_calls, 16):
            simd.call(simd.read_i64(place), simd.read_i64(place + 8))
            if block.barrier:
                simd.call(block.barrier, 0)

    return Kernel(play, TapeBlock)
