"""The workload of a run and the requests generated from it: always the same ones for the same seeds."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle

from lab.bench.dataset import OWN_TEXTS, Message, Sample
from lab.bench.prompts import OwnTexts, PromptSource, Samples, TokenIds
from lab.bench.spec import MAX_REQUESTS, LaneSpec, Lengths, SpecError
from lab.traffic.synthetic import Zipf, gap
from lab.traffic.traces import Arrival

INPUTS, OUTPUTS = Lengths(64, 256), Lengths(64, 64)
TRACE_BOUNDS = Lengths(1, 2**31)


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A request to send: a prompt of token ids, or of messages, and the exact number of tokens to generate
    (`max_tokens`)."""

    model: str
    prompt: Sequence[int]
    max_tokens: int
    lane: str = "default"
    at: float = 0.0
    """Arrival time: when to send the request, in seconds after the beginning of the run."""
    messages: Sequence[Message] = ()
    """Prompt as a conversation, instead of `prompt`."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The workload of a run: all that determines which requests are sent.

    Raises:
        SpecError: a lane is named twice, would never end or has no arrivals; or a value is out of range.
    """

    models: tuple[str, ...]
    """Names of the base model and adapters that requests ask for."""
    lanes: tuple[LaneSpec, ...]
    zipf: float | None = None
    """Exponent of the Zipf law that models are drawn by, the first most often. None or 0 means that they take turns."""
    trace: str | None = None
    """Path of the trace that lanes with neither `n` nor `rate` replay."""
    rate_scale: float = 1.0
    """Factor by which the trace is replayed faster: its arrival times are divided by it."""
    duration: float | None = None
    """Seconds from the beginning of the run after which no request arrives. None means no limit."""
    seed: int = 0
    prompts: int = 0
    """Second seed. It changes the content of prompts and nothing else, so that prompts find no prefixes of an earlier
    run in the server's cache."""
    token_ids: tuple[int, int] = (1000, 30_000)
    """Range of token ids that prompts are drawn from; its end is excluded."""
    dataset: str | None = None
    """Source of the prompts: `OWN_TEXTS`, or the path of a data set. None means random token ids."""

    def __post_init__(self) -> None:
        names = [lane.name for lane in self.lanes]
        if len(set(names)) < len(names):
            raise SpecError(f"a lane is given twice: {', '.join(names)}")
        self._check_values()
        for lane in self.lanes:
            if lane.rate and not lane.n and lane.rate * (self.duration or 0) > MAX_REQUESTS:
                raise SpecError(f"{lane.name}: rate x --duration makes more than {MAX_REQUESTS} requests")
            if lane.rate and not (lane.n or self.duration):
                raise SpecError(f"{lane.name}: a rate needs n=... or --duration, or it would never end")
            if not (lane.rate or lane.n or self.trace):
                raise SpecError(f"{lane.name}: give n=..., rate=... or --trace FILE")

    def _check_values(self) -> None:
        if not self.models or not all(self.models):
            raise SpecError(f"there must be models, all with names, not {', '.join(map(repr, self.models)) or 'none'}")
        if not 0 < self.rate_scale < math.inf:
            raise SpecError(f"rate_scale must be finite and positive, not {self.rate_scale}")
        for name in ("zipf", "duration"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise SpecError(f"{name} must be finite and not negative, not {value}")

    def items(self, trace: Sequence[Arrival] = (), samples: Sequence[Sample] = ()) -> list[BenchRequest]:
        """Return all lanes' requests in order of arrival, up to `duration`. Lanes with no `n` or `rate` replay `trace`.
        `samples` are the prompts of the data set. Raises SpecError if none of them has a length that a lane accepts."""
        lanes = [self._lane(lane, trace, samples) for lane in self.lanes]
        return sorted(chain.from_iterable(lanes), key=lambda item: item.at)

    def warmup(self, count: int, samples: Sequence[Sample] = ()) -> list[BenchRequest]:
        """Return `count` warm-up requests that arrive at once, with the lanes' lengths, models in turn, and a seed
        other than the run's. `count` requests are generated for each lane, and every `len(lanes)`-th of all of them is
        kept."""
        shapes = tuple(replace(lane, n=count, rate=None, start=0.0) for lane in self.lanes)
        other = replace(self, lanes=shapes, zipf=None, trace=None, duration=None, seed=self.seed + 1_000_003)
        return other.items(samples=samples)[:: len(shapes)]

    def _lane(self, lane: LaneSpec, trace: Sequence[Arrival], samples: Sequence[Sample]) -> Iterator[BenchRequest]:
        models, prompts = self._models(lane), self._prompts(lane, samples)
        for row in self._rows(lane, trace):
            if self.duration is not None and row.time > self.duration:
                return
            prompt = prompts.draw(row)
            yield BenchRequest(
                next(models), prompt.token_ids, prompt.output_tokens, lane.name, row.time, prompt.messages
            )

    def _prompts(self, lane: LaneSpec, samples: Sequence[Sample]) -> PromptSource:
        rng = self._rng(lane, f"prompts {self.prompts}")
        if self.dataset is None:
            return TokenIds(self.token_ids, rng)
        return OwnTexts(rng) if self.dataset == OWN_TEXTS else Samples(samples, lane, rng)

    def _rows(self, lane: LaneSpec, trace: Sequence[Arrival]) -> Iterator[Arrival]:
        if lane.rate or lane.n:
            return self._synthetic(lane)
        return self._replayed(lane, trace)

    def _replayed(self, lane: LaneSpec, trace: Sequence[Arrival]) -> Iterator[Arrival]:
        inputs, outputs = lane.inputs or TRACE_BOUNDS, lane.outputs or TRACE_BOUNDS
        for row in trace:
            at = lane.start + row.time / self.rate_scale
            yield Arrival(at, inputs.bound(row.prompt_tokens), outputs.bound(row.output_tokens), blocks=row.blocks)

    def _synthetic(self, lane: LaneSpec) -> Iterator[Arrival]:
        lengths = self._rng(lane, "lengths")
        inputs, outputs = lane.inputs or INPUTS, lane.outputs or OUTPUTS
        for at in arrivals(lane, self._rng(lane, "arrivals")):
            yield Arrival(at, inputs.draw(lengths), outputs.draw(lengths))

    def _models(self, lane: LaneSpec) -> Iterator[str]:
        if not self.zipf:
            yield from cycle(self.models)
        draw = Zipf(len(self.models), self.zipf or 0.0, self._rng(lane, "models"))
        while True:
            yield self.models[draw()]

    def _rng(self, lane: LaneSpec, purpose: str) -> random.Random:
        """Return the random generator of a lane for one purpose, such as its arrivals or its lengths, so that changing
        the lengths does not change the arrivals."""
        return random.Random(f"{self.seed}/{lane.name}/{purpose}")


def arrivals(lane: LaneSpec, rng: random.Random) -> Iterator[float]:
    """Yield a lane's `n` arrival times in seconds from the beginning of the run (without end if `n` is None). Gaps are
    Gamma-distributed with mean 1/rate and the lane's CV; without a rate they are 0."""
    at, count = lane.start, 0
    while lane.n is None or count < lane.n:
        if lane.rate:
            at += gap(lane.rate, lane.cv, rng)
        yield at
        count += 1
