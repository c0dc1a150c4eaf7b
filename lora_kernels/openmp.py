"""Compiled kernels on torch's own threads.

torch, oneDNN and MKL share one OpenMP team, whose threads spin for a while after each operation. A second pool beside
it wants the same cores. So kernels are C functions that `GOMP_parallel` of the very library torch has loaded runs on
that team. Measured on two cores, a linear and then a kernel that takes 52 us alone: 0.36 ms, of which starting the team
is 2 us; as numba's own parallel loop 0.45; on the team of another libgomp 8 ms, what the system lets a thread spin.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
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

MAPS = Path("/proc/self/maps")
HERE = Path(__file__).parent
TICKETS = [("item", ctypes.c_int64), ("thread", ctypes.c_int64)]
"""What every argument block begins with, both 0: where threads draw their next item and their own number."""
ITEM, THREAD = 0, 1


class Kernel:
    """A compiled function of one argument block."""

    def __init__(self, function: Callable[[Any], None], block: type[ctypes.Structure]) -> None:
        record = numba.from_dtype(np.dtype(block))
        self.compiled = _compile(function, numba.types.void(numba.types.CPointer(record)))
        self.address: int = self.compiled.address
        self.alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)


class Recorder(Protocol):
    """Is told of every kernel that is run, and has the memory for what they give each other."""

    def take(self, kernel: Kernel, block: ctypes.Structure, form: Hashable) -> None: ...

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor: ...


class _OfThread(threading.local):
    recorder: Recorder | None = None


_OWN = _OfThread()
"""Of whoever asks, whichever team he asks."""


class Team:
    """Runs kernels. `is_parallel` is False where torch's OpenMP library is not one we can call: kernels run alone.

    Attributes:
        barrier: address of the function at which the threads of a team wait for each other; 0: there is no team.
    """

    def __init__(self) -> None:
        path = find_libgomp(MAPS.read_text(), Path(torch.__file__).parent) if MAPS.is_file() else None
        self.is_parallel = path is not None
        self.barrier = 0
        if path is not None:
            library = ctypes.CDLL(path)
            self._parallel = library.GOMP_parallel
            self._parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            self._parallel.restype = None
            self.barrier = ctypes.cast(library.GOMP_barrier, ctypes.c_void_p).value or 0

    @contextmanager
    def recorded_by(self, recorder: Recorder) -> Iterator[None]:
        """What this thread runs; it is run all the same. Not nested."""
        _OWN.recorder = recorder
        try:
            yield
        finally:
            _OWN.recorder = None

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor for a kernel to fill."""
        if _OWN.recorder is not None:
            return _OWN.recorder.empty(shape, dtype)
        return torch.empty(shape, dtype=dtype)

    def run(self, kernel: Kernel, block: ctypes.Structure, num_items: int, form: Hashable = None) -> None:
        """Returns when every thread has drawn an item beyond the last. One item is not worth a team, none not a call.

        Args:
            form: what has planned the block for a whole step, if anything has. See `Tape.renew`.
        """
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
    """The one there is."""
    return Team()


def _compile(function: Callable[[Any], None], signature: Any) -> Any:
    """Kept on disk beside the sources where that can be written to, else where numba keeps what it compiles.

    numba looks at a function's own file when it asks whether what it kept is still true, and never at what the function
    calls: beside the sources it is kept by the hash of all of them.
    """
    config: Any = numba.config
    before, folder = config.CACHE_DIR, HERE / "__pycache__"
    if os.access(HERE, os.W_OK):
        config.CACHE_DIR = str(folder / f"kernels-{_hash_sources()}")
    try:
        return numba.cfunc(signature, cache=True, error_model="numpy")(function)
    finally:
        config.CACHE_DIR = before


def _hash_sources() -> str:
    digest = hashlib.sha256(numba.__version__.encode())
    for path in sorted(HERE.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def find_libgomp(maps: str, torch_folder: Path) -> str | None:
    """Which libgomp torch runs on, from the list of what is mapped into this process; None when that is not certain.

    Other libraries bring one of their own. Its threads would be a second pool, the very thing to avoid: beside torch's
    on two cores every operation of either was measured to take the 8 ms after which the system lets the other run.
    """
    lines = (line.split(maxsplit=5) for line in maps.splitlines() if "libgomp" in line)
    found = sorted({fields[5] for fields in lines if len(fields) == 6})
    homes = (torch_folder, torch_folder.with_name("torch.libs"))
    torchs = [path for path in found if any(home in Path(path).parents for home in homes)]
    candidates = torchs or found
    return candidates[0] if len(candidates) == 1 else None
