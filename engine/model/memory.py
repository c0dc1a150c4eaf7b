"""How much memory there is, how many pages that makes, and the taking of it."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.config import EngineConfig

Progress = Callable[[str, int, int], None]
"""What is going on, and how much of how much is done."""

GIB = 2**30
HOST_LIMIT = 4 * GIB
HOST_SHARE, DEVICE_SHARE = 0.25, 0.9
CACHE_LINE = 64
CPU = torch.device("cpu")
POPULATE_WRITE = 23
"""What Linux 5.14 and later call MADV_POPULATE_WRITE: pages become writable, and what they hold stays."""
PIECE = 64 << 20
"""Bytes provided at a time: whoever touches other pages meanwhile waits for no more."""
POPULATE_AFTER_S = 10.0
"""Seconds after a tensor's allocation at which its pages are provided. Clearing gigabytes takes seconds of a core,
which a server that is starting needs itself."""


def count_pages(config: EngineConfig, page_bytes: int, device: torch.device, reserved: int = 0) -> int:
    """Pages of the pool, from `num_pages`, `memory_gb` or what is free now (call it with the weights loaded).

    Args:
        reserved: bytes of what is free now that others will take.

    Raises:
        ValueError: the memory holds fewer than two pages.
    """
    if config.num_pages:
        return config.num_pages
    budget = int(config.memory_gb * GIB) or _default_budget(device, reserved)
    if budget < 2 * page_bytes:
        raise ValueError(f"a page pool of {budget} bytes holds fewer than two pages of {page_bytes}")
    return budget // page_bytes


def count_host_pages(config: EngineConfig, page_bytes: int) -> int:
    """Host pages that `swap_gb` makes, of at most a quarter of the memory that is free now."""
    return int(min(config.swap_gb * GIB, HOST_SHARE * free_host_bytes())) // page_bytes


def _default_budget(device: torch.device, reserved: int) -> int:
    if device.type == "cuda":
        return int(DEVICE_SHARE * (torch.cuda.mem_get_info(device)[0] - reserved))
    return min(HOST_LIMIT, int(HOST_SHARE * free_host_bytes()))


def free_host_bytes() -> int:
    """Memory this process could still take: what the kernel calls available, within its control group's limit.

    On systems without /proc it is all physical memory.
    """
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = (line.split() for line in meminfo.read_text().splitlines())
    available = next(int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:")
    return min(available, _control_group_room(Path("/sys/fs/cgroup"), available))


def _control_group_room(root: Path, unlimited: int) -> int:
    limit, used = root / "memory.max", root / "memory.current"
    if not (limit.is_file() and used.is_file()) or limit.read_text().strip() == "max":
        return unlimited
    return max(0, int(limit.read_text()) - int(used.read_text()))


def upload(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """On the device, in the order of its work; through pinned memory, so that nobody waits for it."""
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[count] zeros, aligned to a cache line.

    On the CPU it is NumPy's memory, which the system hands out as it is first touched: torch would write all of it
    now, and a pool is gigabytes of which a small load uses little.
    """
    if device.type != "cpu":
        return torch.zeros(count, dtype=dtype, device=device)
    raw = torch.from_numpy(np.zeros(count * dtype.itemsize + CACHE_LINE, dtype=np.uint8))
    start = -raw.data_ptr() % CACHE_LINE
    return raw[start : start + count * dtype.itemsize].view(dtype)


def populate(memory: Tensor) -> None:
    """Has the system provide all of a CPU tensor's memory, beside whatever goes on; on a GPU it is there.

    Without it an adapter is copied into pages that nobody has touched, each in a huge page that is cleared first: for
    one of rank 16, 5 ms instead of 1 (on a virtual machine whose host has to find the memory too). Where the system
    does not know how, pages go on coming when they are touched; and where there is less memory than was asked for, of
    which a load may use little: taking it all would have the system kill this process, or another.
    """
    if memory.device.type == "cpu" and PIECE < memory.nbytes <= free_host_bytes():
        timer = threading.Timer(POPULATE_AFTER_S, _provide, (memory,))
        timer.daemon = True
        timer.start()


def _provide(memory: Tensor) -> None:
    """Provide the memory in pieces. Each call runs without the interpreter's lock, but holds the kernel's lock of this
    process's memory map, for which imports and allocations wait. At a low priority it held that lock for longer, and a
    start took two seconds more."""
    if memory.nbytes > free_host_bytes():
        return
    madvise, page = ctypes.CDLL(None).madvise, os.sysconf("SC_PAGE_SIZE")
    first, last = memory.data_ptr() + page - 1, memory.data_ptr() + memory.nbytes
    for start in range(first // page * page, last // page * page, PIECE):
        size = min(PIECE, last // page * page - start)
        if madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), POPULATE_WRITE):
            return
