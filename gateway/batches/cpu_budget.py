"""Processor time that the check of one batch's input may use: in slices with pauses between them, up to a limit.

The check runs in a process of its own (`gateway.batches.validate`), with a low priority. The pauses let the engine have
its caches and memory back on a machine with few cores, and the limit ends a check whose lines take long to parse. Its
process has a limit of the kernel's, too, which ends a check that is stuck in a single line.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable

MAX_CPU_SECONDS = 60.0
"""Maximum processor time of a check. 50,000 short lines take 1.5 s, 200 MB of long prompts 2 s, and 200 MB of tools
with JSON schemas 10 s."""
SLICE_SECONDS = 0.1
PAUSE_SECONDS = 0.025
GRACE_SECONDS = 5
"""Seconds of processor time beyond the limit after which the kernel ends a process that is stuck in one line."""


class CpuBudget:
    """Counts the processor time of this process from its creation on. `pause_if_due` is called after each line."""

    def __init__(
        self,
        limit: float,
        clock: Callable[[], float] = time.process_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`limit` is in seconds of `clock`."""
        self.limit = limit
        self._clock, self._sleep = clock, sleep
        self._began = self._slice_began = clock()

    @property
    def is_spent(self) -> bool:
        return self._clock() - self._began >= self.limit

    def pause_if_due(self) -> None:
        """Sleep for PAUSE_SECONDS if SLICE_SECONDS have been used since the last pause."""
        if self._clock() - self._slice_began > SLICE_SECONDS:
            self._sleep(PAUSE_SECONDS)
            self._slice_began = self._clock()


def end_process_beyond(limit: float) -> None:
    """Have the kernel end this process (SIGXCPU), without a core dump, when it has used GRACE_SECONDS more than `limit`
    seconds of processor time."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = math.ceil(limit) + GRACE_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (most, most + GRACE_SECONDS))
