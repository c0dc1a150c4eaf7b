"""Grammars of running requests. A matcher yields a mask of the tokens allowed next, and is advanced by each sampled
token, or, after a preemption, by all so far. Slow masks are computed beside the steps."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.core.messages.commands import MaskReady
from engine.core.messages.grammar import Grammar
from engine.core.messages.requests import ErrorCode, Refusal, SamplingParams
from engine.core.messages.step import SampledToken
from engine.executor.base import Report
from engine.model.grammar.cache import GrammarCache
from engine.model.grammar.compiler import Compiler
from engine.model.grammar.mask_cost import step_share
from engine.model.grammar.mask_thread import MaskThread
from engine.model.grammar.row import AHEAD_SECONDS, GrammarRow
from engine.model.sample.masks import TokenMasks, num_words, pack_bits
from engine.model.sample.sampler import stops_of
from engine.model.sample.soundness import AnswerEnd


class StepMasks(NamedTuple):
    """The masks of a step: None if no request of it follows a grammar. `proposals` has those of each request that may
    be kept; `unsampled` has the requests whose masks are not there, which have no rows in `masks`."""

    masks: TokenMasks | None
    proposals: dict[str, tuple[int, ...]]
    unsampled: tuple[str, ...] = ()


class GrammarRoom:
    """The grammars of one executor, called from its thread, but for `start` and `close`. `report` receives the outcome
    of each compilation and of each mask that `begin` starts."""

    def __init__(self, compiler: Compiler, vocab_size: int, eos_token_ids: tuple[int, ...], report: Report) -> None:
        self._compiler = compiler
        self._cache = GrammarCache(compiler, report)
        self._thread = MaskThread(lambda: compiler.idle_matcher(), report)
        self._report = report
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._rows: dict[str, GrammarRow] = {}
        self._seconds = 0.0
        """Processor time that masks have taken within steps since `take_seconds`."""

    def start(self) -> None:
        """Make the processes that try grammars before they are compiled start some seconds from now, if no grammar
        starts them earlier."""
        self._compiler.start()

    def close(self) -> None:
        """End the processes that try grammars and the thread of slow masks."""
        self._compiler.close()
        self._thread.close()

    def prepare(self, forgotten: Sequence[Grammar], prepared: Sequence[Grammar]) -> None:
        for grammar in forgotten:
            self._cache.forget(grammar)
        for grammar in prepared:
            self._cache.begin(grammar)

    def add(self, request_id: str, params: SamplingParams, tokens: Sequence[int], num_prompt: int) -> SamplingParams:
        """Add a request that begins or resumes: its matcher, if it has a grammar, consumes `tokens[num_prompt:]`.
        Return the parameters that the sampler has to apply, without `min_tokens` if masks enforce it."""
        if params.grammar is None:
            return params
        compiled, answer = self._cache.compiled(params.grammar), list(tokens[num_prompt:])
        stops = pack_bits(stops_of(params, self._eos_token_ids, self._vocab_size), self._vocab_size)
        num_early = params.min_tokens - len(answer)
        row = GrammarRow(params.grammar, compiled.matcher.deep_copy(), num_early, stops, compiled.cost)
        if compiled.guesses and params.speculates and not params.has_penalties:
            row.ahead = compiled.guesses.deep_copy()
        if compiled.cost.exceeds(rows=1):
            row.slow_down()
        row.start(compiled.first, answer)
        self._rows[request_id] = row
        return params._replace(min_tokens=0)

    def remove(self, request_id: str) -> None:
        """Drop a request's grammar matcher. Does nothing if the request has no grammar."""
        row = self._rows.pop(request_id, None)
        if row is not None and row.has_failed:
            self._cache.discard(row.grammar)

    def begin(self, request_ids: Sequence[str]) -> None:
        """Start to compute the next masks of slow requests, beside the steps; each is reported once. A mask that is
        there already is reported at once."""
        for request_id in request_ids:
            row = self._rows.get(request_id)
            if row is None or not row.is_slow or row.ready is not None:
                self._report(MaskReady(request_id, 0.0))
            else:
                self._thread.begin(request_id, row)

    def slow(self, request_ids: Iterable[str]) -> tuple[str, ...]:
        """Return those of the requests whose next mask has to be computed beside the steps."""
        rows = ((name, self._rows.get(name)) for name in request_ids)
        return tuple(name for name, row in rows if row is not None and row.is_slow and row.ready is None)

    def take_seconds(self) -> float:
        """Return the processor time, in seconds, that masks have taken within steps since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def bind(self, request_ids: Sequence[str]) -> bool:
        """Return whether any of these requests follows a grammar. If so, the step needs `masks`, and the host must
        first have read the tokens of all steps before it. Changes nothing."""
        return not self._rows.keys().isdisjoint(request_ids)

    def masks(
        self, request_ids: Sequence[str], proposals: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    ) -> StepMasks:
        """Return masks of the tokens that grammars allow in the rows of a step. Row i is of `request_ids[i]`, where
        those without a mask are left out; a request with `proposals` is listed once more for each of them."""
        names = [name for name in dict.fromkeys(request_ids) if name in self._rows]
        kept = dict(proposals)
        if not names:
            return StepMasks(None, kept)
        counts = Counter(request_ids)
        lines = {name: np.empty((counts[name], num_words(self._vocab_size)), dtype=np.int32) for name in names}
        unsampled = self._fill(lines, kept)
        sampled = [name for name in request_ids if name not in unsampled]
        places = tuple(place for place, name in enumerate(sampled) if name in lines)
        if not places:
            return StepMasks(None, kept, unsampled)
        left = {name: iter(own) for name, own in lines.items()}
        words = np.stack([next(left[sampled[place]]) for place in places])
        return StepMasks(TokenMasks(places, words), kept, unsampled)

    def _fill(self, lines: dict[str, npt.NDArray[np.int32]], kept: dict[str, tuple[int, ...]]) -> tuple[str, ...]:
        """Fill the lines of each request with its masks, quick grammars first, and cut the proposals to those that may
        be kept. Return the requests without masks: of slow grammars, and those left after twice the masks' time."""
        rows, spent, unsampled = [(self._rows[name], name) for name in lines], 0.0, []
        most = 2 * len(rows) * step_share(len(rows))
        for row, name in sorted(rows, key=lambda one: one[0].cost.mean):
            if not row.is_slow and (row.cost.exceeds(len(rows)) or spent > most):
                row.slow_down()
            if row.is_slow and row.ready is None:
                unsampled.append(name)
                continue
            began, guess = time.thread_time(), kept.get(name, ())
            count = row.fill(list(lines[name]), guess if spent <= AHEAD_SECONDS else ())
            if guess:
                kept[name] = guess[:count]
            seconds = time.thread_time() - began
            row.cost.add(seconds, masks=(row.ready is None) + count)
            spent += seconds
        self._seconds += spent
        return tuple(unsampled)

    def forced(self, request_ids: Iterable[str]) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return (request id, tokens) for each request whose grammar leaves only one text to come: the tokens that the
        tokenizer makes of this text, at most `row.MOST_FORCED`. Masks also allow other tokens for the same text."""
        found = {name: self._rows[name].following() for name in request_ids if name in self._rows}
        return tuple((name, tokens) for name, tokens in found.items() if tokens)

    def advance(self, sampled: Sequence[SampledToken]) -> dict[str, AnswerEnd]:
        """Advance matchers by the sampled tokens, each up to its first failure. Return id -> end for the requests that
        cannot continue; their grammars will not be cached."""
        ends: dict[str, AnswerEnd] = {}
        taken: Counter[str] = Counter()
        for request_id, token, *_ in sampled:
            row = self._rows.get(request_id)
            if row is None or request_id in ends:
                continue
            began = time.thread_time()
            why = row.advance(token)
            seconds = time.thread_time() - began
            row.cost.add(seconds, masks=0)
            self._seconds += seconds
            if why:
                self._cache.discard(row.grammar)
                ends[request_id] = AnswerEnd(Refusal(ErrorCode.INVALID_GRAMMAR, why), taken[request_id])
            taken[request_id] += 1
        return ends
