"""Steps that were submitted to a device and are not collected yet, and the clocks that time them."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol

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
        """Records and returns a mark (on a GPU an event) that the device passes once all work enqueued so far is
        done."""

    def has_passed(self, mark: Mark) -> bool:
        """Returns, without waiting, whether the device has passed the mark."""

    def seconds(self, first: Mark, last: Mark) -> float:
        """Waits until the device has passed `last`. Returns the seconds between the two marks."""


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


@dataclass(slots=True)
class SubmittedStep:
    """A step that was submitted to a device and is not collected yet.

    Attributes:
        sample: the step's tokens. None means that the step samples none.
        begun, ended: marks before and after the step's work.
        uses: the pages that the step's work reads or writes.
        launched: whether the step was launched kernel by kernel.
        released: ids of requests released after the step was submitted. A token for such an id must be dropped, because
            another request may have the id by now.
        tokens: the sampled tokens, once they have been read (`is_read`).
        vectors: the step's vectors, which may be read once the device has passed `ended`. None: it completes none.
        scores: the step's logprobs of prompts, which may be read at the same time. None means that it has none.
        failed: the requests that cannot go on (see `StepResult.failed`), once their tokens have been read.
        unsampled: the requests of the step whose masks were not there, so that it samples none of their tokens.
        drafts: what the draft model is asked for once the tokens have been read.
    """

    sample: Sample | None
    begun: Mark
    ended: Mark
    uses: PageUses
    launched: bool = False
    released: set[str] = field(default_factory=set)
    tokens: tuple[SampledToken, ...] = ()
    failed: dict[str, AnswerEnd] = field(default_factory=dict)
    is_read: bool = False
    vectors: Vectors | None = None
    scores: Scores | None = None
    drafts: tuple[DraftAsk, ...] = ()
    unsampled: tuple[str, ...] = ()

    def read(self) -> tuple[SampledToken, ...]:
        """Waits for the step's sampled tokens, and returns and keeps them; empty if the step samples none."""
        self.tokens, self.is_read = tuple(self.sample.to_host()) if self.sample else (), True
        return self.tokens

    def read_outputs(self) -> tuple[tuple[PooledVector, ...], tuple[PromptRows, ...]]:
        """Return the step's vectors and its logprobs of prompts, without those of requests for which they are NaN or
        infinite: these fail. The device must have finished the step."""
        vectors = self.vectors.read() if self.vectors else {}
        scores = self.scores.read() if self.scores else {}
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
