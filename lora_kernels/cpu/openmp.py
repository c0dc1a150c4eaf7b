"""Runs compiled kernels on torch's own OpenMP threads, through `GOMP_parallel` of the library that torch has loaded,
because a second pool of spinning threads would compete for the cores (8 ms instead of 0.36)."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numba
import numpy as np
import torch
from torch import Tensor

from lora_kernels.cpu.kernel_cache import cached

MAPS = Path("/proc/self/maps")
TICKETS = [("item", ctypes.c_int64), ("thread", ctypes.c_int64)]
"""The first fields of every argument block, 0 before each run: counters from which threads draw their next item and
their own thread number."""
ITEM, THREAD = 0, 1


class Kernel:
    """A C function, compiled when the object is made, that takes the address of one argument block. `address` is the
    function's address; `alone` calls it on the calling thread."""

    def __init__(self, function: Callable[[Any], None], block: type[ctypes.Structure]) -> None:
        record = numba.from_dtype(np.dtype(block))
        signature = numba.types.void(numba.types.CPointer(record))
        self.compiled = cached(numba.cfunc(signature, cache=True, error_model="numpy"))(function)
        self.address: int = self.compiled.address
        self.alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)


class TapeRecorder(Protocol):
    """Receives the kernel runs of a thread that records, and allocates the tensors that its kernels pass to each other.
    `Team.run` calls `take` with each run's kernel, argument block and form, and `Team.empty` calls `empty`."""

    def take(self, kernel: Kernel, block: ctypes.Structure, form: Hashable) -> None: ...

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor: ...


class _OfThread(threading.local):
    recorder: TapeRecorder | None = None


_OWN = _OfThread()
"""Holds each thread's own recorder, or None while that thread does not record."""


class Team:
    """Runs kernels on torch's OpenMP team. `team` returns the process's only object."""

    def __init__(self) -> None:
        path = find_libgomp(MAPS.read_text(), Path(torch.__file__).parent) if MAPS.is_file() else None
        self.is_parallel = path is not None
        """False where torch's OpenMP library cannot be called; kernels then run on the calling thread alone."""
        self.barrier = 0
        """Address of the function at which the threads of a team wait for each other; 0 if there is no team."""
        if path is not None:
            library = ctypes.CDLL(path)
            self._parallel = library.GOMP_parallel
            self._parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            self._parallel.restype = None
            self.barrier = ctypes.cast(library.GOMP_barrier, ctypes.c_void_p).value or 0

    @contextmanager
    def recorded_by(self, recorder: TapeRecorder) -> Iterator[None]:
        """Within the context, passes every kernel that this thread runs to `recorder` before running it, and lets
        `recorder` allocate what `empty` returns. Contexts must not be nested."""
        _OWN.recorder = recorder
        try:
            yield
        finally:
            _OWN.recorder = None

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised CPU tensor, allocated by the recorder if this thread records."""
        if _OWN.recorder is not None:
            return _OWN.recorder.empty(shape, dtype)
        return torch.empty(shape, dtype=dtype)

    def run(self, kernel: Kernel, block: ctypes.Structure, num_items: int, form: Hashable = None) -> None:
        """Pass a run to the recorder, if this thread records, and run the kernel on up to `num_items` of torch's
        threads, which draw items from `block.item`, until all have finished. `form` is the plan's key in `Tape.renew`,
        or None."""
        if _OWN.recorder is not None:
            _OWN.recorder.take(kernel, block, form)
        if not num_items:
            return
        block.item = block.thread = 0
        threads = min(num_items, torch.get_num_threads())
        if threads > 1 and self.is_parallel:
            self._parallel(kernel.address, ctypes.addressof(block), threads, 0)
        else:
            kernel.alone(ctypes.addressof(block))


@cache
def team() -> Team:
    """Return the process's only `Team`."""
    return Team()


def find_libgomp(maps: str, torch_folder: Path) -> str | None:
    """Return the path of the libgomp that torch uses: the one mapped from `torch_folder` or `torch.libs` beside it,
    else the only one mapped, else None. `maps` is the text of /proc/self/maps."""
    lines = (line.split(maxsplit=5) for line in maps.splitlines() if "libgomp" in line)
    found = sorted({fields[5] for fields in lines if len(fields) == 6})
    homes = (torch_folder, torch_folder.with_name("torch.libs"))
    torchs = [path for path in found if any(home in Path(path).parents for home in homes)]
    candidates = torchs or found
    return candidates[0] if len(candidates) == 1 else None
