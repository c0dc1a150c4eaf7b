"""What a run is measured by. Throughput and latency are two figures, never one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class Stream:
    """Arrival times of one request's tokens, in seconds since it was sent."""

    times: list[float] = field(default_factory=list)
    tokens: int = 0

    @property
    def ttft(self) -> float:
        return self.times[0]

    @property
    def gaps(self) -> list[float]:
        return list(np.diff(self.times))


@dataclass(frozen=True, slots=True)
class Measured:
    """One run. Seconds, and output tokens a second."""

    name: str
    tokens: int
    seconds: float
    streams: Sequence[Stream]

    @property
    def throughput(self) -> float:
        return self.tokens / self.seconds

    def ttft(self, percentile: float) -> float:
        return float(np.percentile([stream.ttft for stream in self.streams], percentile))

    def itl(self, percentile: float) -> float:
        return float(np.percentile([gap for stream in self.streams for gap in stream.gaps], percentile))
