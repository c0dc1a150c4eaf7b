"""Loads single kernels from peers' wheels without importing the servers around them.

It is enough to unpack a wheel and put it on PYTHONPATH; README.md lists the few files that are needed. Parent packages
of a kernel's module are created without running their __init__, and stand-ins here provide the few things that the
kernels import from their server. Settings come from the peers' own modules of environment variables, so that their
defaults are those of production.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from enum import IntEnum
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

INCOMPLETE = "other files than benchmarks/gpu/README.md lists, or another version than this was written for"


class PeerAbsent(Exception):
    """A peer's wheel is not installed, or it is another version than expected. The message says which."""


def find_package(name: str) -> Path:
    """Return the folder of a peer's package without importing it. Raises PeerAbsent if it is not on the path."""
    found = find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise PeerAbsent(f"{name} is not importable here: name the folder of its unpacked wheel with --peers")
    return Path(found.submodule_search_locations[0])


def load_kernel_module(name: str, standins: Mapping[str, Mapping[str, Any]]) -> ModuleType:
    """Import module `name` of a peer without running its packages' __init__, and return it. `standins` maps names of
    modules to the attributes of stand-ins, which stay in sys.modules, except where a module is there already. Raises
    PeerAbsent if the wheel has no such module, or if the module needs more than the stand-ins provide."""
    root = name.partition(".")[0]
    folder = find_package(root)
    for standin, values in standins.items():
        module = ModuleType(standin)
        vars(module).update(values)
        sys.modules.setdefault(standin, module)
    for wanted in (name, *standins):
        _enter_packages(wanted, folder)
    try:
        return import_module(name)
    except (ImportError, AttributeError) as error:
        raise PeerAbsent(f"{name} cannot be used: {error} ({INCOMPLETE})") from error


def _enter_packages(name: str, folder: Path) -> None:
    """Put the parent packages of a module, found below `folder`, into sys.modules without running their __init__."""
    parts = name.split(".")
    for depth in range(1, len(parts)):
        package = ".".join(parts[:depth])
        if package not in sys.modules:
            spec = ModuleSpec(package, None, is_package=True)
            spec.submodule_search_locations = [str(folder.joinpath(*parts[1:depth]))]
            sys.modules[package] = module_from_spec(spec)


class _Logger:
    """Stand-in for vLLM's logger, which has non-standard methods. Every method prints its message."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, method: str) -> Callable[..., None]:
        return lambda text, *values, **_: print(self._name, method, text % values, file=sys.stderr)


class _Platform:
    """Stand-in for vLLM's `current_platform`."""

    def is_cuda(self) -> bool:
        return torch.cuda.is_available()

    def is_cuda_alike(self) -> bool:
        return torch.cuda.is_available()

    def is_rocm(self) -> bool:
        return False

    def is_xpu(self) -> bool:
        return False

    def is_cpu(self) -> bool:
        return not torch.cuda.is_available()

    def fp8_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn

    def has_device_capability(self, least: int | tuple[int, int]) -> bool:
        wanted = least if isinstance(least, tuple) else divmod(least, 10)
        return torch.cuda.is_available() and torch.cuda.get_device_capability() >= wanted

    def is_device_capability_family(self, family: int) -> bool:
        return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == family // 10


class _KVQuantMode(IntEnum):
    """Stand-in for vLLM's KV quantization modes; the suite uses only NONE."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4


def _register_nothing(*_: Any, **__: Any) -> None:
    """Do nothing: the suite calls kernels directly, not as torch operations."""


def _upload(values: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype).to(device)


VLLM: Mapping[str, Mapping[str, Any]] = {
    "vllm.logger": {"init_logger": _Logger},
    "vllm.platforms": {"current_platform": _Platform(), "vllm_version_matches_substr": lambda _: False},
    "vllm.utils.torch_utils": {"direct_register_custom_op": _register_nothing, "async_tensor_h2d": _upload},
    "vllm.triton_utils": {"triton": triton, "tl": tl, "HAS_TRITON": True},
    "vllm.v1.kv_cache_interface": {"KVQuantMode": _KVQuantMode},
}
"""Stand-ins for vLLM 0.32: module name -> attributes."""


class _LoraBatchInfo:
    """Stand-in for a class that SGLang's kernels name in annotations only."""


def _uncached(*_: Any, **__: Any) -> Callable[[Any], Any]:
    """Return a decorator that leaves a kernel unchanged: inside a CUDA graph, SGLang's launch cache saves nothing."""
    return lambda kernel: kernel


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


SGLANG: Mapping[str, Mapping[str, Any]] = {
    "sglang.srt.lora.utils": {"LoRABatchInfo": _LoraBatchInfo},
    "sglang.srt.utils": {"cached_triton_kernel": _uncached, "get_device_name": _device_name},
}
"""Stand-ins for SGLang 0.5.23: module name -> attributes."""


def find_module(package: str, file: str) -> str:
    """Return the dotted name of the module in `package` with the file name `file`. Raises PeerAbsent if none has it."""
    folder = find_package(package)
    found = sorted(folder.rglob(file))
    if not found:
        raise PeerAbsent(f"{package} has no {file} ({INCOMPLETE})")
    return ".".join((package, *found[0].relative_to(folder).with_suffix("").parts))
