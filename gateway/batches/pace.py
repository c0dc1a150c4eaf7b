"""Controls how many lines of a shard ask the tenant's limits at once: more and more, until a limit refuses one."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf

from gateway.batches.gate import AdmissionQueue, Order

FIRST_WINDOW = 16
"""Number of lines that may ask the limits at once before any was admitted."""
FORGOTTEN_SECONDS = 30.0
"""Seconds after its last refusal for which a shard counts as limited."""
TIMER_SECONDS = 0.01
"""Margin in seconds that is added to the timer for the next attempt, because the loop's timers may fire early."""


class LimitAttempt:
    """One line's attempt to pass the tenant's rate limits and quotas, which counts in the `LimitWindow` until
    `is_over`. The line's runner calls `admitted` when the limits have granted it."""

    def __init__(self, window: LimitWindow, queue: AdmissionQueue) -> None:
        self._limits = window
        self._queue = queue
        self.is_over = False

    def admitted(self) -> None:
        self._limits.widen()
        self.leave()

    def leave(self) -> None:
        """End the attempt, so that another line of the shard may ask the limits. Does nothing if it has ended."""
        if not self.is_over:
            self.is_over = True
            self._queue.leave()


class LimitWindow:
    """Bounds how many lines of a shard ask the tenant's limits at the same time, for each base model apart. The bound
    grows by one with each admitted line, and is one again after a refusal, when none asks
    until the wait is over. Lines that wait hold no place.

    If the tenant's share of a base model's batch lane is full, only this tenant's lines for that model pause, and the
    bound keeps its size."""

    def __init__(self) -> None:
        self._queues: dict[str, AdmissionQueue] = {}
        self._window = FIRST_WINDOW
        self._rest_until = 0.0
        self._full_until: defaultdict[str, float] = defaultdict(float)
        self._refused_at = -inf

    @property
    def is_limited(self) -> bool:
        """True while a refusal's wait is running, and for FORGOTTEN_SECONDS after a limit refused a line."""
        return self.seconds_to_next > 0 or asyncio.get_running_loop().time() < self._refused_at + FORGOTTEN_SECONDS

    @property
    def seconds_to_next(self) -> float:
        """Seconds until lines of every base model may ask the limits; 0 if no refusal's wait is running."""
        return self._seconds_until(max(self._rest_until, *self._full_until.values(), 0.0))

    def seconds_to_next_of(self, model: str) -> float:
        """Return the seconds until another line of a base model may ask the limits."""
        return self._seconds_until(max(self._rest_until, self._full_until[model]))

    @asynccontextmanager
    async def attempt(self, model: str, order: Order) -> AsyncIterator[LimitAttempt]:
        """Wait until a line of a base model may ask the limits, the least `order` first, and yield its attempt. On
        exit, an attempt that was not admitted ends."""
        queue = self._queue(model)
        await queue.enter(order)
        asking = LimitAttempt(self, queue)
        try:
            yield asking
        finally:
            asking.leave()

    def widen(self) -> None:
        """Let one more line ask the limits at the same time, because they admitted one."""
        self._window += 1

    def refused(self, seconds: float) -> None:
        """Report that a limit refused a line: for `seconds`, no line of the shard asks the limits, and then one at a
        time until they admit one."""
        loop = asyncio.get_running_loop()
        self._window, self._refused_at = 1, loop.time()
        self._rest_until = max(self._rest_until, loop.time() + seconds)
        loop.call_at(self._rest_until + TIMER_SECONDS, self._admit)

    def lane_was_full(self, model: str, seconds: float) -> None:
        """Report that the batch lane of a base model had no capacity for the tenant: for `seconds`, none of the model's
        lines ask the limits, and then as many as before."""
        loop = asyncio.get_running_loop()
        self._full_until[model] = max(self._full_until[model], loop.time() + seconds)
        loop.call_at(self._full_until[model] + TIMER_SECONDS, self._admit)

    @staticmethod
    def _seconds_until(time: float) -> float:
        return max(0.0, time - asyncio.get_running_loop().time())

    def _admit(self) -> None:
        for queue in self._queues.values():
            queue.admit()

    def _queue(self, model: str) -> AdmissionQueue:
        if model not in self._queues:
            queue = self._queues[model] = AdmissionQueue(lambda: self._room(model, queue))
        return self._queues[model]

    def _room(self, model: str, queue: AdmissionQueue) -> int:
        return 0 if self.seconds_to_next_of(model) else self._window - queue.inside
