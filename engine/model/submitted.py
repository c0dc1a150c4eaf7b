"""Steps that a device has been given and not yet answered for."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from engine.core.types import SampledToken
from engine.model.sampling import Sample

Mark = Any
"""A moment in a device's work."""


class WorkClock(Protocol):
    """Times a device's work, as the device comes to it."""

    def mark(self) -> Mark:
        """Behind all work so far."""

    def has_passed(self, mark: Mark) -> bool:
        """Whether the device has come to it."""

    def seconds(self, first: Mark, last: Mark) -> float:
        """Between two marks. Waits until the device has come to the last."""


class HostClock:
    """Of a device that has done its work when it has been told to."""

    def mark(self) -> float:
        return time.perf_counter()

    def has_passed(self, mark: float) -> bool:
        return True

    def seconds(self, first: float, last: float) -> float:
        return last - first


class CudaClock:
    """Of a GPU: events in the stream of its kernels. What a step waits for those before it is not counted."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def has_passed(self, mark: torch.cuda.Event) -> bool:
        return mark.query()

    def seconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        last.synchronize()
        return first.elapsed_time(last) / 1000


@dataclass(frozen=True, slots=True)
class SubmittedStep:
    """
    Attributes:
        sample: its tokens; None where it chooses none.
        begun, ended: marks before and behind its work.
        released: requests let go since. A token for one of them is nobody's: another may have its name by now.
    """

    sample: Sample | None
    begun: Mark
    ended: Mark
    released: set[str] = field(default_factory=set)

    def sampled(self) -> list[SampledToken]:
        """Waits for the tokens."""
        return self.sample.to_host() if self.sample else []
