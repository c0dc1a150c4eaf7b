"""Chooses the device and the dtype, measures free memory, and allocates as many pages as fit into it."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.process.host_memory import total_host_bytes
from engine.sizing import DEVICE_SHARE, GIB, HOST_SHARE
from lora_kernels.layout import MAX_ELEMENTS

Progress = Callable[[str, int, int], None]
"""Callback: receives the current activity, the amount that is done, and the total amount."""

HOST_LIMIT = 4 * GIB
MOST_POOL_BYTES = 2 * MAX_ELEMENTS
CACHE_LINE = 64
CPU = torch.device("cpu")
POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14 and later, which makes pages writable and keeps their contents."""
PIECE = 64 << 20
"""Bytes of memory that are provided at a time. A thread that touches other pages meanwhile waits for one piece at
most."""
POPULATE_AFTER_S = 10.0
"""Delay in seconds after a tensor's allocation until its pages are provided. Clearing gigabytes takes seconds of a
core, which a server that is starting needs itself."""


def count_pages(config: EngineConfig, page_bytes: int, device: torch.device, reserved: int = 0) -> int:
    """Return the number of pages of the device's pool: as configured by `num_pages` or `memory_gb`, else from a share
    of the free memory less `reserved` bytes. Call it after the weights are loaded. Raises ValueError below two pages,
    and above a CPU machine's memory."""
    # The share is 0.9 of a GPU's memory, or a quarter of the host's, at most 4 GiB, times `machine_share`; adapters'
    # tables bound it, too.
    if device.type == "cpu":
        _check_possible(config, page_bytes)
    if config.num_pages:
        return config.num_pages
    budget = int(config.memory_gb * GIB) or _default_budget(device, reserved, config.machine_share)
    if budget < 2 * page_bytes:
        raise ValueError(f"a page pool of {budget} bytes holds fewer than two pages of {page_bytes}")
    return min(budget, MOST_POOL_BYTES) // page_bytes


def _check_possible(config: EngineConfig, page_bytes: int) -> None:
    """Raise ValueError, which says what to set, if the page pool is set to more memory than this machine has."""
    total, wanted = total_host_bytes(), config.num_pages * page_bytes or config.memory_gb * GIB
    if wanted > total:
        name = f"num_pages: {config.num_pages:,} pages take" if config.num_pages else "memory_gb: the page pool takes"
        has = f"{wanted / GIB:,.1f} GiB, and this machine has {total / GIB:,.1f} GiB"
        raise ValueError(f"engine.{name} {has}: lower it, or set 0 for the default")


def count_host_pages(config: EngineConfig, page_bytes: int) -> int:
    """Return the number of host pages for saved KV: as many as fit into `swap_gb` GiB, or into a quarter of the free
    host memory, times `machine_share`, if that is less."""
    return int(min(config.swap_gb * GIB, HOST_SHARE * config.machine_share * free_host_bytes())) // page_bytes


def _default_budget(device: torch.device, reserved: int, machine_share: float) -> int:
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what torch keeps of loading the weights is free for pages
        return int(DEVICE_SHARE * (torch.cuda.mem_get_info(device)[0] - reserved))
    return int(machine_share * min(HOST_LIMIT, HOST_SHARE * max(0, free_host_bytes() - reserved)))


def free_host_bytes() -> int:
    """Return the bytes this process could still allocate: what the kernel calls available, within its cgroup's limit.
    On systems without /proc it is all physical memory."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = (line.split() for line in meminfo.read_text().splitlines())
    available = next(int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:")
    return min(available, _control_group_room(Path("/sys/fs/cgroup"), available))


def _control_group_room(root: Path, unlimited: int) -> int:
    """Return the bytes that this process may still allocate within its cgroup's limit, or `unlimited`. Cached pages of
    files count as free, because the kernel drops them when memory is needed."""
    limit, used, parts = root / "memory.max", root / "memory.current", root / "memory.stat"
    if not (limit.is_file() and used.is_file()) or limit.read_text().strip() == "max":
        return unlimited
    stat = dict(line.split() for line in parts.read_text().splitlines()) if parts.is_file() else {}
    cached = sum(int(stat.get(name, 0)) for name in ("active_file", "inactive_file"))
    return max(0, int(limit.read_text()) - int(used.read_text()) + cached)


def zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return [count] zeros, aligned to a cache line. On the CPU they come from NumPy, whose memory the system provides
    as it is first touched; torch would write gigabytes at once."""
    if device.type != "cpu":
        return torch.zeros(count, dtype=dtype, device=device)
    raw = torch.from_numpy(np.zeros(count * dtype.itemsize + CACHE_LINE, dtype=np.uint8))
    start = -raw.data_ptr() % CACHE_LINE
    return raw[start : start + count * dtype.itemsize].view(dtype)


def populate(memory: Tensor) -> threading.Timer | None:
    """Have the system provide (fault in) a CPU tensor's memory, in a thread that starts after POPULATE_AFTER_S, and
    return its timer, or None for GPU tensors, small ones, and those larger than the free memory."""
    # Without this, an adapter is copied into untouched huge pages that are cleared first: 5 ms instead of 1 for rank
    # 16. More memory than is free would make the system kill a process.
    if memory.device.type == "cpu" and PIECE < memory.nbytes <= free_host_bytes():
        timer = threading.Timer(POPULATE_AFTER_S, _provide, (memory,))
        timer.daemon = True
        timer.start()
        return timer
    return None


def _provide(memory: Tensor) -> None:
    """Have the system provide (fault in) a tensor's memory in pieces, if that much is free."""
    # Each call holds the kernel's lock of this process's memory map, for which imports and allocations wait: at a low
    # priority, a start took two seconds more.
    if memory.nbytes > free_host_bytes():
        return
    madvise, page = ctypes.CDLL(None).madvise, os.sysconf("SC_PAGE_SIZE")
    first, last = memory.data_ptr() + page - 1, memory.data_ptr() + memory.nbytes
    for start in range(first // page * page, last // page * page, PIECE):
        size = min(PIECE, last // page * page - start)
        if madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), POPULATE_WRITE):
            return


def pick_device(name: str) -> torch.device:
    """Return the device that `engine.device` names; auto means CUDA where there is a device, else the CPU. Raises
    ValueError if `name` is cuda, and torch finds no CUDA device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("engine.device is cuda, but torch sees no CUDA device")
    return torch.device(name)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype that `engine.dtype` names; auto means bfloat16 on a GPU or a CPU that multiplies in bfloat16
    (AVX-512 or AMX), and float32 elsewhere."""
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if device.type == "cuda" or native else torch.float32
