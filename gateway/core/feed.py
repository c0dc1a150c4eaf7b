"""Decides how many batch lines a gateway may send to an engine: enough that the engine never runs out of lines, but not
so many that they pile up there.

A line that waits in the engine takes part in its scheduling by tenant, deadline and adapter, but it costs memory and no
other gateway can take it. Therefore the number of waiting lines is kept at what the engine may need before the gateway
polls it again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

LEAST = 16
"""Lines that a gateway may always have waiting, however many lines of other gateways wait already."""
MOST = 512
"""Maximum number of lines that should wait in the engine."""
HORIZON_S = 1.0
"""Seconds of work, at the rate at which lines end, that should wait in the engine. It spans several polls."""
MEMORY = 0.7
"""Weight of the previous rate when the rate is updated at a poll."""


@dataclass(frozen=True, slots=True)
class Flow:
    """Snapshot of the batch lane as one gateway sees it. All counts are lines of batch jobs."""

    running: int = 0
    """Lines of all gateways that ran in the engine at the last poll."""
    others: int = 0
    """Lines of other gateways that waited in the engine at the last poll."""
    waiting: int = 0
    """Lines of this gateway that are on their way to the engine or wait there."""
    begun: int = 0
    """Lines of this gateway that the engine has begun to run."""
    rate: float = 0.0
    """Lines of this gateway that end per second, as a moving average over polls."""

    @property
    def target(self) -> int:
        """Number of lines of all gateways that should wait in the engine: as many as run, because all may end in one
        step, or as end in HORIZON_S if these are more, but from LEAST to MOST."""
        return int(min(MOST, max(LEAST, self.running, self.rate * HORIZON_S)))

    def room(self, most: int) -> int:
        """Return how many more lines this gateway may send now: until `target` lines wait, or LEAST of its own.

        `most` is the total number of lines that this gateway may have in the engine or on the way to it.
        """
        wanted = max(self.target - self.others - self.waiting, LEAST - self.waiting)
        return max(0, min(wanted, most - self.waiting - self.begun))

    def after_poll(self, running: int, waiting: int, ended: int, seconds: float) -> Flow:
        """Return a copy with `running`, `others` and `rate` updated by what a poll of the engine reported.

        Args:
            running: lines of all gateways that run in the batch lane.
            waiting: lines of all gateways that wait in the batch lane.
            ended: lines of this gateway that ended since the last poll.
            seconds: time since the last poll. The rate stays unchanged if it is not positive.
        """
        rate = MEMORY * self.rate + (1 - MEMORY) * ended / seconds if seconds > 0 else self.rate
        return replace(self, running=running, others=max(0, waiting - self.waiting), rate=rate)
