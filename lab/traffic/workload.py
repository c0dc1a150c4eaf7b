"""The workload of a simulation: a trace, a refilled backlog of batch work, and the requests with prompts made from
them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from random import Random

from engine.core.messages.requests import Lane, Request, SamplingParams
from lab.traffic.synthetic import Shares, Sizes, Zipf, adapter_ranks
from lab.traffic.traces import BLOCK_TOKENS, Arrival, Trace

FIRST_UNIQUE, LAST_TOKEN = 2**30, 2**31
"""Half-open range of the token ids of prompt parts that are not shared. Token ids of shared blocks are below the
range."""
TOKEN_MASK = 2**31 - 1
NEVER_SAMPLED = -1
"""Token id that predictions have at the positions where they are wrong."""
BATCH_TENANT = "batch"
NO_LIMIT, FIRST_GUESS = 1 << 20, 1024
"""For requests whose answers end by themselves: `max_tokens`, which the engine cuts to the context, and the number of
output tokens that a gateway expects before it has seen an answer."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """Batch work of a simulation, of which `size` requests are always unfinished: when one ends, another arrives, until
    the workload's horizon. Raises ValueError if a value is out of range."""

    size: int
    prompt: Sizes
    output: Sizes
    deadline_s: float | None = None
    """Deadline of each request in seconds from its arrival. None means that there is none."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"the batch backlog must hold at least one request, not {self.size}")
        if self.deadline_s is not None and not 0 < self.deadline_s < math.inf:
            raise ValueError(f"the batch deadline must be finite and positive, not {self.deadline_s:g}")


@dataclass(frozen=True, slots=True)
class Workload:
    trace: Trace
    horizon: float
    """Arrival of the trace's last request, in virtual seconds, after which the backlog is no longer refilled."""
    backlog: Backlog | None = None
    adapters: int = 0
    zipf: float = 1.0
    """Zipf exponent of the popularity of adapters among the backlog's requests."""
    seed: int = 0
    predicted: Shares | None = None
    """Share of each answer's tokens that a prediction has right. None means that requests have no predictions."""
    limited: bool = True
    """True means that each request's `max_tokens` is the length of its answer. False means that answers end by
    themselves, so that the scheduler does not know their lengths."""

    def only(self, lane: Lane) -> Workload:
        """Return the part of this workload that belongs to one lane, with the same horizon: its requests of the trace
        and, for batch, the backlog."""
        backlog = self.backlog if lane is Lane.BATCH else None
        return replace(self, trace=[arrival for arrival in self.trace if arrival.lane is lane], backlog=backlog)

    @property
    def has_batch(self) -> bool:
        return self.backlog is not None or any(arrival.lane is Lane.BATCH for arrival in self.trace)

    def ranks(self) -> dict[str, int]:
        """Return the LoRA rank of each of the workload's adapters, by adapter hash, drawn at random from `seed`."""
        return {adapter_hash(index): rank for index, rank in enumerate(adapter_ranks(self.adapters, self.seed))}


def adapter_hash(index: int) -> str:
    return f"adapter-{index:04}"


class RequestMaker:
    """Makes requests, including their prompts, from arrivals when they are submitted. Ids count up, and each prompt is
    new except for its shared blocks. `deadline_s` is in seconds from the arrival."""

    def __init__(self, predicted: Shares | None = None, seed: int = 0, *, limited: bool = True) -> None:
        """`predicted` is the share of an answer's tokens that the request's predicted output (for speculative decoding)
        has right, at random places; None means that requests have none. `limited` is that of a `Workload`."""
        self._made = 0
        self._unique = FIRST_UNIQUE
        self._predicted = predicted
        self._rng = Random(seed)
        self._limited = limited

    def __call__(self, arrival: Arrival, deadline_s: float | None = None) -> Request:
        self._made += 1
        return Request(
            id=f"r{self._made}",
            prompt_ids=self._prompt(arrival),
            params=self._params(arrival),
            adapter_hash=None if arrival.adapter < 0 else adapter_hash(arrival.adapter),
            lane=arrival.lane,
            tenant=arrival.tenant,
            arrival=arrival.time,
            deadline=None if deadline_s is None else arrival.time + deadline_s,
            prediction=self._prediction(arrival),
            expected_tokens=None if self._limited else FIRST_GUESS,
        )

    def _params(self, arrival: Arrival) -> SamplingParams:
        params = SamplingParams(max_tokens=arrival.output_tokens, ignore_eos=True, seed=self._made)
        if self._limited:
            return params
        last = position_token(self._made, arrival.prompt_tokens + arrival.output_tokens - 1)
        return params._replace(max_tokens=NO_LIMIT, stop_token_ids=(last,))

    def _prediction(self, arrival: Arrival) -> tuple[int, ...]:
        if self._predicted is None:
            return ()
        share, first = self._predicted.draw(self._rng), arrival.prompt_tokens
        return tuple(
            position_token(self._made, position) if self._rng.random() < share else NEVER_SAMPLED
            for position in range(first, first + arrival.output_tokens)
        )

    def _prompt(self, arrival: Arrival) -> tuple[int, ...]:
        """Return a prompt: the tokens of the arrival's shared blocks, then tokens that no other prompt has."""
        named = chain.from_iterable(range(b * BLOCK_TOKENS, (b + 1) * BLOCK_TOKENS) for b in arrival.blocks)
        tokens = tuple(named)[: arrival.prompt_tokens]
        rest = arrival.prompt_tokens - len(tokens)
        if self._unique + rest > LAST_TOKEN:
            self._unique = FIRST_UNIQUE
        first, self._unique = self._unique, self._unique + rest
        return tokens + tuple(range(first, first + rest))


def backlog_arrivals(workload: Workload, backlog: Backlog) -> Iterator[Arrival]:
    """Yield batch requests without end, with random sizes and adapters drawn from the workload's seed. Their times are
    0; the caller sets them when it submits the requests."""
    rng = Random(workload.seed)
    draw = Zipf(workload.adapters, workload.zipf, Random(workload.seed)) if workload.adapters else None
    while True:
        yield Arrival(
            time=0.0,
            prompt_tokens=backlog.prompt.draw(rng),
            output_tokens=backlog.output.draw(rng),
            tenant=BATCH_TENANT,
            lane=Lane.BATCH,
            adapter=draw() if draw else -1,
        )


def position_token(seed: int, position: int) -> int:
    """Return the made-up token that a simulated request with this seed has at a position, counted from 0 from the
    prompt's first token on."""
    return (seed * 0x9E3779B1 + position) & TOKEN_MASK
