"""Gives memory back to the operating system after a burst of large requests.

glibc keeps what is freed, in two ways that are mended at the start: its threshold above which a block is mapped on its
own, and returned when it is freed, rises to 32 MiB with the blocks that are freed; and each thread gets a heap of its
own. What small blocks leave behind is returned by looking every now and then: when much more memory is resident than
the process has in use, the free pages are returned. Elsewhere than on Linux with glibc nothing is done.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

PAGE_BYTES = 4096
LOOK_SECONDS = 0.25
"""Interval at which the resident memory is read, which takes 40 us."""
STEADY_LOOKS, STEADY_BYTES = 8, 2**20
"""While the resident memory changes by less than so many bytes, glibc is asked for what is in use only at each so many
looks: it walks all free blocks, 42 ms for 200,000."""
GROWN_BYTES = 12 * 2**20
"""Memory to return at which it is returned, and growth at which garbage is collected: less than 10 % of what a gateway
has resident. glibc locks a heap while it returns the free pages of that, for 9 ms for each 32 MiB; the event loop may
have to wait for it."""
CALM_BYTES = 4 * 2**20
"""Maximum growth within LOOK_SECONDS at which garbage is collected. Until then, requests need what has grown."""
MOST_OBJECTS = 200_000
"""Maximum number of objects in the oldest generation at which all garbage is collected: 10 to 20 ms, in which the event
loop stands still. With more, the objects of the younger generations alone are looked at."""
MMAP_THRESHOLD, ARENA_MAX = -3, -8
"""Parameters of mallopt in glibc's malloc.h: M_MMAP_THRESHOLD and M_ARENA_MAX."""
MAPPED_BYTES = 256 * 2**10
"""Size from which blocks are mapped on their own."""
MOST_ARENAS = 2


class Mallinfo(ctypes.Structure):
    """struct mallinfo2 of glibc's malloc.h."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "k")
    )


def glibc() -> Any:
    """Return glibc, or None where the C library is another one or too old."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return None
    library.mallinfo2.restype = Mallinfo
    return library


def bound_heaps() -> None:
    """Make glibc return large blocks when they are freed, and share few heaps between threads. Called once, before the
    process starts threads."""
    library = glibc()
    if library is not None:
        library.mallopt(MMAP_THRESHOLD, MAPPED_BYTES)
        library.mallopt(ARENA_MAX, MOST_ARENAS)


class MemoryKeeper:
    """Looks at the memory of this process, and returns what it does not need any more."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._resident_before = 0
        """Resident bytes at the last look."""
        self._unused = self.resident() - self.used()
        """Resident bytes beyond those in use that were left when memory was last returned: code, stacks and gaps."""
        self._collected = self.used()
        """Bytes that were in use after the last collection of garbage."""
        self._skipped = 0
        """Number of looks since glibc was asked."""

    def resident(self) -> int:
        """Return the bytes of this process that are in physical memory."""
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * PAGE_BYTES

    def used(self) -> int:
        """Return the bytes that this process has allocated from glibc, which locks each heap while it is counted."""
        info = self._library.mallinfo2()
        return int(info.uordblks + info.hblkhd)

    async def look(self) -> None:
        """Collect garbage and return free memory, if much of either may have come."""
        resident = self.resident()
        change, self._resident_before = resident - self._resident_before, resident
        self._skipped = self._skipped + 1 if abs(change) < STEADY_BYTES else STEADY_LOOKS
        if self._skipped < STEADY_LOOKS:
            return
        self._skipped = 0
        calm, used = change < CALM_BYTES, await asyncio.to_thread(self.used)
        self._collected = min(self._collected, used)
        self._unused = min(self._unused, resident - used)
        if calm and used - self._collected > GROWN_BYTES:
            collect_garbage()
            self._collected = used = await asyncio.to_thread(self.used)
        if self.resident() - used - self._unused > GROWN_BYTES:
            await asyncio.to_thread(self._library.malloc_trim, 0)
            self._unused = self.resident() - await asyncio.to_thread(self.used)


def collect_garbage() -> None:
    """Collect garbage within some 20 ms."""
    gc.collect(1)
    if len(gc.get_objects(2)) <= MOST_OBJECTS:
        gc.collect()


@asynccontextmanager
async def memory_kept_low() -> AsyncIterator[None]:
    """Return memory to the operating system during the block."""
    library = glibc()
    if library is None:
        yield
        return
    keeping = asyncio.create_task(_keep(MemoryKeeper(library)), name="memory")
    try:
        yield
    finally:
        keeping.cancel()
        with suppress(asyncio.CancelledError):
            await keeping


async def _keep(keeper: MemoryKeeper) -> None:
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        await keeper.look()
