"""Records a sequence of kernel runs on a tape, and replays it as one kernel in one parallel region, which saves
starting each (10 us). The caller first writes the step's new inputs and plans into the recorded memory."""

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

from lora_kernels.cpu import simd
from lora_kernels.cpu.openmp import TICKETS, Kernel, team
from lora_kernels.cpu.simd import I64

T = TypeVar("T")

BLOCK_NUMBERS = 32
"""Maximum size of an argument block, in int64 numbers."""


class TapeBlock(ctypes.Structure):
    """Argument block of the kernel that plays a tape. `calls` is the address of int64 [num_calls, 2]: addresses of a
    kernel and of its argument block. `barrier` is the address of the threads' barrier, or 0 if there is none."""

    _fields_ = [*TICKETS, *((name, ctypes.c_int64) for name in ("num_calls", "calls", "barrier"))]


@dataclass(slots=True)
class _Piece:
    """A piece of a workspace's memory. `user` is a weak reference, which returns None when no tensor uses the piece."""

    memory: Tensor
    user: Callable[[], Any]

    @property
    def is_free(self) -> bool:
        return self.user() is None


class Workspace:
    """Memory for tensors that kernels pass to each other, reused as soon as no tensor over it is left. Tapes that are
    played in turn share one. Sizes of pieces are powers of two, so that few are made."""

    def __init__(self) -> None:
        self._pieces: list[_Piece] = []

    @property
    def num_bytes(self) -> int:
        return sum(len(piece.memory) for piece in self._pieces)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        large = (piece for piece in self._pieces if len(piece.memory) >= size and piece.is_free)
        piece = min(large, key=lambda piece: len(piece.memory), default=None)
        if piece is None:
            piece = _Piece(torch.empty(1 << (size - 1).bit_length(), dtype=torch.uint8), lambda: None)
            self._pieces.append(piece)
        seen = piece.memory[:size].numpy()
        piece.user = weakref.ref(seen)  # every tensor and view over the piece holds `seen`
        return torch.from_numpy(seen).view(dtype).view(tuple(shape))

    def let_go(self, tensor: Tensor) -> Tensor:
        """Return a tensor over the memory of `tensor`, which must be from `empty` (else ValueError). The new one does
        not keep the memory in use, so that later kernels may overwrite its numbers."""
        [memory] = [piece.memory for piece in self._pieces if piece.memory.data_ptr() == tensor.data_ptr()]
        return memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


class _Call(NamedTuple):
    kernel: Kernel
    block: bytes
    form: Hashable


class _Recording:
    """A `TapeRecorder` that copies each run to `calls` and allocates from a workspace."""

    def __init__(self, workspace: Workspace) -> None:
        self.calls: list[_Call] = []
        self.empty = workspace.empty

    def take(self, kernel: Kernel, block: ctypes.Structure, form: Hashable) -> None:
        self.calls.append(_Call(kernel, bytes(block).ljust(8 * BLOCK_NUMBERS, b"\0"), form))


def record(compute: Callable[[], T], workspace: Workspace) -> tuple[Tape, T]:
    """Run `compute`, and return a tape of the kernels that this thread runs meanwhile, with the result. Only kernels
    may compute in between, and the caller keeps the memory that they use in place."""
    recording = _Recording(workspace)
    with team().recorded_by(recording):
        result = compute()
    return Tape(recording.calls, workspace), result


class Tape:
    """A sequence of kernel calls that can be played any number of times."""

    def __init__(self, calls: Sequence[_Call], workspace: Workspace) -> None:
        self._workspace = workspace  # kernels write there, so it must outlive the tape
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
        """Keys of the recorded runs whose plan changes from step to step, each for a call of `renew`. See
        `Team.run`."""

    @property
    def num_calls(self) -> int:
        return len(self._kernels)

    def renew(self, form: Hashable, block: ctypes.Structure) -> None:
        """Copy this step's plan from `block` into the argument blocks that were recorded with `form`: the fields that
        the block class names in `of_step`. What `block` points to must stay in place until the tape has been played."""
        columns, names = _of_step(type(block))
        self._blocks[np.ix_(self._planned[form], columns)] = [getattr(block, name) for name in names]

    def play(self) -> None:
        """Run all recorded calls again, in order, on torch's threads. Return when all are done."""
        self._blocks[:, : len(TICKETS)] = 0
        threads = torch.get_num_threads() if team().is_parallel else 1
        self._block.barrier = team().barrier if threads > 1 else 0
        team().run(player(), self._block, threads)


@cache
def _of_step(kind: Any) -> tuple[list[int], tuple[str, ...]]:
    """Return the int64 indices and the names of the fields that an argument block class lists in `of_step`."""
    return [getattr(kind, name).offset // 8 for name in kind.of_step], kind.of_step


@cache
def player() -> Kernel:
    """Return the kernel that plays a tape, compiled on first use."""

    def play(pointer):
        block = carray(pointer, 1)[0]
        for place in range(block.calls, block.calls + 16 * block.num_calls, 16):
            _call_at(simd.read_i64(place), simd.read_i64(place + 8))
            if block.barrier:
                _call_at(block.barrier, 0)

    return Kernel(play, TapeBlock)


@intrinsic
def _call_at(typingctx, function, argument):
    """Call the C function at an address, with another address as its argument."""

    def codegen(context, builder, signature, args):
        of = ir.FunctionType(ir.VoidType(), [I64])
        builder.call(builder.inttoptr(args[0], of.as_pointer()), [args[1]])

    return types.void(types.int64, types.int64), codegen
