"""A pretended CUDA driver: Triton's JIT front end, compiler and launch code run without a GPU, up to a launch, which is
reported instead (pretended_cuda.c) or not at all. A process that has a GPU cannot pretend."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver as active

SOURCE = Path(__file__).with_suffix(".c")
DEVICES = count(1000)
"""Numbers of pretended devices, far above real ones. Triton keeps compiled kernels by the device's number."""
STREAM = 0
SIZES = {"i1": 1, "i8": 1, "u1": 1, "u8": 1, "i16": 2, "u16": 2, "fp16": 2, "bf16": 2, "i32": 4, "u32": 4, "fp32": 4}
"""Bytes of a kernel's parameter, by Triton's name of its type. All other types, such as pointers, have 8."""
OBSERVER = ctypes.CFUNCTYPE(None, ctypes.c_uint64, *(ctypes.c_uint,) * 4, ctypes.POINTER(ctypes.c_void_p))
NO_OBSERVER = OBSERVER()
"""A null pointer."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch, as the driver got it."""

    kernel: str
    """Name of the Python function."""
    grid: tuple[int, int, int]
    """Number of programs along each axis."""
    options: int
    """Number of the launch's own attributes, such as programmatic dependent launch."""
    signature: dict[str, Any]
    """Triton's type of each parameter of the Python function, "constexpr" where it is compiled in."""
    constants: dict[Any, Any]
    """Values of what is compiled in, by parameter."""
    attributes: dict[Any, Any]
    """What the compiler assumes of parameters, such as divisibility by 16, by index."""
    values: tuple[bytes, ...]
    """The bytes of each parameter that the driver got, in the order of the signature."""
    compiled: bool
    """True means that the kernel was compiled, or read from Triton's cache on disk, for this launch."""


class PretendedCuda(nvidia.CudaDriver):
    """Triton's CUDA driver over the pretended libcuda. Make it with `pretend`."""

    def __init__(self, library: ctypes.CDLL, capability: int) -> None:
        self.utils = _Utils(self)
        self.launcher_cls = partial(_launcher, self)
        self.launches: list[Launch] = []
        """Launches since `record` was last called."""
        self.compiled: list[str] = []
        """Names of the kernels compiled, or read from Triton's cache on disk, in the order in which they were."""
        self._library, self._device = library, next(DEVICES)
        self._target = GPUTarget("cuda", capability, 32)
        self._sources: dict[int, Any] = {}
        self._source: Any = None
        self._compiled_before = 0
        self._observer = OBSERVER(self._observe)
        self.get_current_device = lambda: self._device
        self.get_current_stream = lambda _: STREAM
        self.get_device_capability = lambda _: divmod(capability, 10)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def record(self, on: bool = True) -> list[Launch]:
        """Begin a new list of launches and return it. If `on` is False, launches are not recorded any more, and cost
        the host what they cost it with a real driver, except for the driver's own time."""
        self.launches = []
        self._library.pretended_observe(self._observer if on else NO_OBSERVER)
        return self.launches

    def stop(self) -> None:
        """Record no more launches, and keep the list."""
        self._library.pretended_observe(NO_OBSERVER)

    def expect(self, source: Any) -> None:
        """Note the source of the binary that is loaded next."""
        self._source = source

    def loaded(self, function: int) -> None:
        self._sources[function] = self._source

    def on_compile(self, **facts: Any) -> None:
        self.compiled.append(facts["fn"].name)

    def _observe(self, function: int, x: int, y: int, z: int, options: int, params: Any) -> None:
        source = self._sources[function]
        sizes = [SIZES.get(kind, 8) for kind in _flat(source.signature.values()) if kind != "constexpr"]
        values = tuple(ctypes.string_at(params[i], size) for i, size in enumerate(sizes))
        signature, constants, attributes = dict(source.signature), dict(source.constants), dict(source.attrs)
        is_new, self._compiled_before = len(self.compiled) > self._compiled_before, len(self.compiled)
        name = source.fn.fn.__name__
        self.launches.append(Launch(name, (x, y, z), options, signature, constants, attributes, values, is_new))


class _Utils:
    """Triton's extension for the CUDA driver, with the properties of a large device."""

    def __init__(self, owner: PretendedCuda) -> None:
        self._owner = owner
        self._real = nvidia.CudaUtils()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def load_binary(self, name: str, kernel: bytes, shared: int, _: int) -> tuple[int, int, int, int, int]:
        loaded = self._real.load_binary(name, kernel, shared, 0)
        self._owner.loaded(loaded[1])
        return loaded

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10, "multiprocessor_count": 132, "warpSize": 32}


def _launcher(owner: PretendedCuda, source: Any, metadata: Any) -> Any:
    owner.expect(source)
    return nvidia.CudaLauncher(source, metadata)


def _flat(kinds: Any) -> Iterator[str]:
    for kind in kinds:
        if isinstance(kind, tuple):
            yield from _flat(kind)
        else:
            yield kind


def can_pretend() -> bool:
    """Return whether this process may pretend: torch sees no GPU, kernels are compiled, and a C compiler exists."""
    has_compiler = any(shutil.which(name) for name in (os.environ.get("CC", "cc"), "gcc", "clang"))
    return not _has_gpu() and not knobs.runtime.interpret and has_compiler


@functools.cache
def _has_gpu() -> bool:
    """Return what torch said before the pretended library was loaded, in which a CUDA build of torch would look."""
    return torch.cuda.is_available()


@contextmanager
def pretend(cache: Path, capability: int = 90) -> Iterator[PretendedCuda]:
    """Make a pretended GPU the device of Triton's launches while the block runs.

    Args:
        cache: the folder of Triton's cache of compiled kernels.
        capability: compute capability of the GPU, 90 for 9.0.

    Raises:
        RuntimeError: This process cannot pretend, see `can_pretend`.
    """
    if not can_pretend():
        raise RuntimeError("pretending needs a machine without a GPU, a C compiler, and Triton without its interpreter")
    folder, library = _library()
    with knobs.nvidia.scope(), knobs.cache.scope(), knobs.runtime.scope():
        knobs.nvidia.libcuda_path = folder.name
        knobs.cache.dir = str(cache)
        driver = PretendedCuda(library, capability)
        knobs.runtime.jit_post_compile_hook = driver.on_compile
        before = active._active
        active.set_active(driver)
        try:
            driver.record()
            yield driver
        finally:
            driver.stop()
            active._active = before


@functools.cache
def _library() -> tuple[TemporaryDirectory[str], ctypes.CDLL]:
    """Build libcuda.so.1 in a folder that lives as long as this process, and load it. Triton opens the library by its
    name, and so gets the one that is loaded."""
    folder, include = TemporaryDirectory(), Path(nvidia.__file__).parent / "include"
    path = Path(folder.name) / "libcuda.so.1"
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")))
    options = ["-O2", "-shared", "-fPIC", f"-I{include}", f"-Wl,-soname,{path.name}"]
    subprocess.run([compiler, *options, "-o", str(path), str(SOURCE)], check=True)
    return folder, ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
