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
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic
from torch import Tensor

from lora_kernels import simd
from lora_kernels.openmp import TICKETS, Kernel, team
from lora_kernels.simd import I64

T = TypeVar("T")

BLOCK_NUMBERS = 32
"""int64 that an argument block may have."""


class TapeBlock(ctypes.Structure):
    """`calls`: int64 [num_calls, 2], a kernel's address and its argument block's; `barrier`: 0 where there is none."""

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

    Tapes that are played in turn share one. It stays small, and so in the cache: pieces are powers of two, so that
    steps that grow row by row do not each leave pieces of their own behind.
    """

    def __init__(self) -> None:
        self._pieces: list[_Piece] = []

    @property
    def num_bytes(self) -> int:
        return sum(len(piece.memory) for piece in self._pieces)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        piece = next((piece for piece in self._pieces if len(piece.memory) >= size and piece.is_free), None)
        if piece is None:
            piece = _Piece(torch.empty(1 << (size - 1).bit_length(), dtype=torch.uint8), lambda: None)
            self._pieces.append(piece)
        seen = piece.memory[:size].numpy()
        piece.user = weakref.ref(seen)  # which every tensor and view over it holds
        return torch.from_numpy(seen).view(dtype).view(tuple(shape))

    def let_go(self, tensor: Tensor) -> Tensor:
        """The same numbers, until others are written over them. `tensor`: as `empty` gave it."""
        [memory] = [piece.memory for piece in self._pieces if piece.memory.data_ptr() == tensor.data_ptr()]
        return memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


class _Call(NamedTuple):
    kernel: Kernel
    block: bytes
    form: Hashable


class _Recording:
    """A `Recorder`."""

    def __init__(self, workspace: Workspace) -> None:
        self.calls: list[_Call] = []
        self.empty = workspace.empty

    def take(self, kernel: Kernel, block: ctypes.Structure, form: Hashable) -> None:
        self.calls.append(_Call(kernel, bytes(block).ljust(8 * BLOCK_NUMBERS, b"\0"), form))


def record(compute: Callable[[], T], workspace: Workspace) -> tuple[Tape, T]:
    """A tape of what this thread runs meanwhile, and what came of it: it is computed as ever.

    Nothing but kernels may compute between the first and the last of them: what else does is not on the tape. The
    caller keeps what they read and write, but for the workspace, where it is.
    """
    recording = _Recording(workspace)
    with team().recorded_by(recording):
        result = compute()
    return Tape(recording.calls, workspace), result


class Tape:
    """Calls of kernels, to be played any number of times.

    Attributes:
        forms: what has planned blocks for a whole step. See `Team.run`.
    """

    def __init__(self, calls: Sequence[_Call], workspace: Workspace) -> None:
        self._workspace = workspace  # where kernels write: it must not go before the tape
        self._kernels = [call.kernel for call in calls]
        self._blocks = np.frombuffer(b"".join(call.block for call in calls), dtype=np.int64).copy()
        self._blocks = self._blocks.reshape(len(calls), BLOCK_NUMBERS)
        starts = self._blocks.ctypes.data + self._blocks.strides[0] * np.arange(len(calls))
        self._calls = np.stack([[kernel.address for kernel in self._kernels], starts], axis=1)
        self._block = TapeBlock(num_calls=len(calls), calls=self._calls.ctypes.data)
        self._planned: dict[Hashable, list[int]] = {}
        for place, call in enumerate(calls):
            if call.form is not None:
                self._planned.setdefault(call.form, []).append(place)
        self.forms: tuple[Any, ...] = tuple(self._planned)

    @property
    def num_calls(self) -> int:
        return len(self._kernels)

    def renew(self, form: Hashable, block: ctypes.Structure) -> None:
        """Puts this step's plan into the blocks of a form: the fields that their class lists in `of_step`.

        What it points at has to stay where it is until the tape has been played.
        """
        columns, names = _of_step(type(block))
        self._blocks[np.ix_(self._planned[form], columns)] = [getattr(block, name) for name in names]

    def play(self) -> None:
        """Computes all of it once more."""
        self._blocks[:, : len(TICKETS)] = 0
        threads = torch.get_num_threads() if team().is_parallel else 1
        self._block.barrier = team().barrier if threads > 1 else 0
        team().run(player(), self._block, threads)


@cache
def _of_step(kind: Any) -> tuple[list[int], tuple[str, ...]]:
    """Of an argument block, which int64 a step has planned, and what they are called."""
    return [getattr(kind, name).offset // 8 for name in kind.of_step], kind.of_step


@cache
def player() -> Kernel:
    """What plays a tape, compiled when first asked for."""

    def play(pointer):
        block = carray(pointer, 1)[0]
        for place in range(block.calls, block.calls + 16 * block.num_calls, 16):
            _call_at(simd.read_i64(place), simd.read_i64(place + 8))
            if block.barrier:
                _call_at(block.barrier, 0)

    return Kernel(play, TapeBlock)


@intrinsic
def _call_at(typingctx, function, argument):
    """The C function at an address, with another address."""

    def codegen(context, builder, signature, args):
        of = ir.FunctionType(ir.VoidType(), [I64])
        builder.call(builder.inttoptr(args[0], of.as_pointer()), [args[1]])

    return types.void(types.int64, types.int64), codegen
