"""Says how much memory this machine has for a process, without torch."""

from __future__ import annotations

import os
from pathlib import Path

GIB = 2**30
CONTROL_GROUP = Path("/sys/fs/cgroup/memory.max")


def total_host_bytes() -> int:
    """Return the bytes of this machine's memory, or of the control group's limit if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = CONTROL_GROUP.read_text().strip() if CONTROL_GROUP.is_file() else "max"
    return total if limit == "max" else min(total, int(limit))
