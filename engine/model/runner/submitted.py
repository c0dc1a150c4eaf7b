"""Steps that were submitted to a device and are not collected yet, and the clocks that time them."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from engine.core.messages.step import DraftAsk, PooledVector, PromptRows, SampledToken
from engine.model.memory.arena import PageUses
from engine.model.sample.pooler import Vectors
from engine.model.sample.scorer import Scores
from engine.model.sample.slot_sampler import Sample
from engine.model.sample.soundness import UNSOUND, AnswerEnd

Mark = Any
"""A point in a device's work, for example a CUDA event."""


class WorkClock(Protocol):
    """Protocol of a clock that measures a device's work by marks, which the device passes in the order of its work."""

    def mark(self) -> Mark:
        """Record and return a mark (on a GPU an event) that the device passes once all work enqueued so far is done."""

    def has_passed(self, mark: Mark) -> bool:
        """Return, without waiting, whether the device has passed the mark."""

    def seconds(self, first: Mark, last: Mark) -> float:
        """Wait until the device has passed `last`. Return the seconds between the two marks."""


class HostClock:
    """A `WorkClock` of a device whose work is done when the call that starts the work returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def has_passed(self, mark: float) -> bool:
        return True

    def seconds(self, first: float, last: float) -> float:
        return last - first


class CudaClock:
    """A `WorkClock` of a GPU: events in its kernel stream. The time a step waits for earlier steps is not counted."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def has_passed(self, mark: torch.cuda.Event) -> bool:
        return mark.query()

    def seconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        last.synchronize()
        return first.elapsed_time(last) / 1000


def make_clock(device: torch.device) -> WorkClock:
    """Return a clock that measures the work of a device."""
    return CudaClock() if device.type == "cuda" else HostClock()


class Outputs(NamedTuple):
    """What a step gives for its requests. The host reads it later: `vectors` and `scores` once the device has finished
    the step."""

    sample: Sample | None = None
    """The step's tokens. None means that the step samples none."""
    unsampled: tuple[str, ...] = ()
    """The requests of the step whose masks were not there, so that it samples none of their tokens."""
    vectors: Vectors | None = None
    """The step's vectors. None means that it completes none."""
    scores: Scores | None = None
    """The step's logprobs of prompts. None means that it has none."""


@dataclass(slots=True)
class SubmittedStep:
    """A step that was submitted to a device and is not collected yet."""

    outputs: Outputs
    begun: Mark
    ended: Mark
    """`begun` and `ended`: marks before and after the step's work."""
    uses: PageUses
    """The pages that the step's work reads or writes."""
    launched: bool = False
    """True means that the step was launched kernel by kernel."""
    drafts: tuple[DraftAsk, ...] = ()
    """What the draft model is asked for once the tokens have been read."""
    released: set[str] = field(default_factory=set)
    """Ids of requests released after the step was submitted. A token for such an id must be dropped, because another
    request may have the id by now."""
    tokens: tuple[SampledToken, ...] = ()
    """The sampled tokens, once they have been read (`is_read`)."""
    failed: dict[str, AnswerEnd] = field(default_factory=dict)
    """The requests that cannot go on (see `StepResult.failed`), once their tokens have been read."""
    is_read: bool = False

    def goes_on(self, request_id: str) -> bool:
        """Return whether a request of the step has neither failed nor been released since."""
        return request_id not in self.failed and request_id not in self.released

    def read(self) -> tuple[SampledToken, ...]:
        """Wait for the step's sampled tokens, and return and keep them; empty if the step samples none."""
        sample = self.outputs.sample
        self.tokens, self.is_read = tuple(sample.to_host()) if sample else (), True
        return self.tokens

    def read_outputs(self) -> tuple[tuple[PooledVector, ...], tuple[PromptRows, ...]]:
        """Return the step's vectors and its logprobs of prompts, without those of requests for which they are NaN or
        infinite: these fail. The device must have finished the step."""
        vectors = self.outputs.vectors.read() if self.outputs.vectors else {}
        scores = self.outputs.scores.read() if self.outputs.scores else {}
        for name in [name for name, one in (*vectors.items(), *scores.items()) if one is None]:
            self.failed[name] = AnswerEnd(UNSOUND)
        return tuple(filter(None, vectors.values())), tuple(filter(None, scores.values()))

    @property
    def followed(self) -> tuple[SampledToken, ...]:
        """The sampled tokens, without those of each request from the first one with which it failed."""
        if not self.failed:
            return self.tokens
        seen: Counter[str] = Counter()
        kept = []
        for one in self.tokens:
            end = self.failed.get(one.request_id)
            if end is None or seen[one.request_id] < end.num_good:
                kept.append(one)
            seen[one.request_id] += 1
        return tuple(kept)
