"""Chats beside a batch, without and with proposed tokens; part of `make bench-speculation`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from statistics import median

import numpy as np
from tokenizers import Tokenizer

from benchmarks.runner import Run, in_turn, table_of
from benchmarks.speculation_pair import Pair
from benchmarks.speculation_prompts import make_request, prompts
from engine.core.messages.commands import Abort
from engine.core.messages.requests import Lane, Request, TokenEvent

RATE = 0.7
"""Mean chats per second, as in `make bench-lanes`."""
CHAT_TOKENS, BATCH_TOKENS = 16, 128
BACKLOG = 32
"""Number of batch requests that are always unfinished: as many as the engine computes at a time."""


@dataclass(slots=True)
class Slice:
    """What was measured while one of the engines was used: latencies of chats in seconds, and tokens of the batch."""

    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    batch_tokens: int = 0
    seconds: float = 0.0
    answered: set[str] = field(default_factory=set)

    def note(self, event: TokenEvent, last: dict[str, float], now: float) -> None:
        """Count the tokens of an event that came `now`. `last` has, for each chat, the time of its arrival or of its
        last token, which is updated; requests that are not in it are the batch's."""
        name = event.request_id
        if name not in last:
            self.batch_tokens += len(event.tokens)
        elif event.tokens:
            (self.itl if name in self.answered else self.ttft).append(now - last[name])
            self.answered.add(name)
            last[name] = now


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of all slices without and with proposals; seconds, but for the batch's tokens per second."""

    figure: str
    off: float
    auto: float
    pairs: tuple[float, ...]
    """Ratio auto / off of each pair of slices."""

    @property
    def ratio(self) -> float:
        return self.auto / self.off

    @property
    def spread(self) -> str:
        return f"{median(self.pairs):.2f} ({min(self.pairs):.2f} to {max(self.pairs):.2f})"


COLUMNS = " | off | auto | ratio | of pairs"
CELLS = "{0.figure} | {0.off:.4g} | {0.auto:.4g} | {0.ratio:.2f} | {0.spread}"


class Traffic:
    """Requests of a slice: chats at random times, and batch requests that quote passages."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._rng = Random(seed)
        self._texts = {kind: prompts(kind) for kind in ("chat", "extraction")}
        self._number = 0

    def chats(self, seconds: float) -> Iterator[tuple[float, Request]]:
        """Yield chats with their times, in seconds from the slice's beginning."""
        at = self._rng.expovariate(RATE)
        while at < seconds:
            yield at, self._request("chat", Lane.INTERACTIVE, CHAT_TOKENS)
            at += self._rng.expovariate(RATE)

    def batch(self) -> Request:
        return self._request("extraction", Lane.BATCH, BATCH_TOKENS)

    def _request(self, kind: str, lane: Lane, most: int) -> Request:
        self._number += 1
        request = make_request(self._tokenizer, f"{lane.name}-{self._number}", kind, next(self._texts[kind]))
        return request._replace(lane=lane, params=request.params._replace(max_tokens=most))


def measure(run: Run, pair: Pair, tokenizer: Tokenizer, seconds: float, rounds: int) -> None:
    """Measure slices with the same traffic on both engines, which take turns, after a pair that is not counted."""
    slices: dict[str, list[Slice]] = defaultdict(list)
    for number in run.track(range(rounds + 1), "Slices"):
        for way in in_turn(("auto", "off"), number):
            measured = _slice(pair, way, Traffic(tokenizer, number), seconds)
            slices[way] += [measured] if number else []
    outcomes = [_outcome(*row, slices["off"], slices["auto"]) for row in FIGURES]
    run.show(table_of("Chats beside a batch, without and with proposals", outcomes, COLUMNS, CELLS), outcomes)


def _slice(pair: Pair, way: str, traffic: Traffic, seconds: float) -> Slice:
    engine, result = pair.begin(way), Slice()
    began, chats = pair.clock(), list(traffic.chats(seconds))
    last: dict[str, float] = {}
    live: set[str] = set()
    while (now := pair.clock() - began) < seconds:
        while chats and chats[0][0] <= now:
            _, chat = chats.pop(0)
            last[chat.id] = now
            live.add(chat.id)
            pair.submit(way, chat)
        for request in islice(iter(traffic.batch, None), BACKLOG - sum("BATCH" in name for name in live)):
            live.add(request.id)
            pair.submit(way, request)
        for event in pair.step(engine):
            result.note(event, last, pair.clock() - began)
            if event.finish_reason is not None:
                live.discard(event.request_id)
    result.seconds = pair.clock() - began
    for name in live:
        engine.inbox.put(Abort(name))
    while engine.state.has_work:
        engine.step()
    return result


def _p(samples: Sequence[float], share: float) -> float:
    return float(np.percentile(samples, share)) if samples else float("nan")


Measure = Callable[[Sequence[Slice]], float]
FIGURES: tuple[tuple[str, Measure], ...] = (
    ("chats' TTFT p50", lambda ones: _p([x for one in ones for x in one.ttft], 50)),
    ("chats' TTFT p99", lambda ones: _p([x for one in ones for x in one.ttft], 99)),
    ("chats' ITL p50", lambda ones: _p([x for one in ones for x in one.itl], 50)),
    ("chats' ITL p99", lambda ones: _p([x for one in ones for x in one.itl], 99)),
    ("batch tokens/s", lambda ones: sum(one.batch_tokens for one in ones) / sum(one.seconds for one in ones)),
)


def _outcome(figure: str, measure: Measure, off: Sequence[Slice], auto: Sequence[Slice]) -> Outcome:
    pairs = tuple(measure([b]) / measure([a]) for a, b in zip(off, auto, strict=True))
    return Outcome(figure, measure(off), measure(auto), pairs)
