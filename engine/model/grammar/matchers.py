"""Grammars of running requests. A matcher yields a mask of the tokens allowed next, and is advanced by each sampled
token, or, after a preemption, by all so far. Slow masks are computed beside the steps."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask

from engine.core.messages.commands import MaskReady
from engine.core.messages.grammar import Grammar
from engine.core.messages.requests import ErrorCode, Refusal, SamplingParams
from engine.core.messages.step import SampledToken
from engine.executor.base import Report
from engine.model.grammar.cache import GrammarCache
from engine.model.grammar.compiler import Compiler, reason
from engine.model.grammar.mask_cost import MaskCost, step_share
from engine.model.grammar.mask_thread import MaskThread
from engine.model.sample.masks import TokenMasks, num_words, pack_bits
from engine.model.sample.sampler import stops_of
from engine.model.sample.soundness import AnswerEnd

AHEAD_SECONDS = 0.005
"""Maximum processor time in seconds for following a request's proposals in a step. Once it is exceeded, no more
proposals of the request are followed, in this step and later. Sixteen usually take 0.3 ms; a hostile grammar can take
0.1 s for a token. Once the masks of a step have taken that long, the step follows no more proposals."""
MOST_FORCED = 16
"""Maximum number of forced tokens that are reported: as many as a step can compute (`engine.core.plan.proposals`)."""


@dataclass(slots=True)
class _GrammarRow:
    """A running request that follows a grammar."""

    grammar: Grammar
    matcher: LLMatcher
    num_early: int
    """Number of tokens that must still come before a stop token may; negative once there are more."""
    stops: npt.NDArray[np.int32]
    """Bit mask of the stop tokens. They are banned while `num_early` is positive and other tokens are allowed."""
    cost: MaskCost
    """What the grammar's masks take."""
    ahead: LLMatcher | None = None
    """A second matcher, which consumes proposals and is rolled back. It shares nothing with `matcher`, so that guesses
    cannot make the request fail. None means that no proposals are followed: without speculation, with penalties, and no
    more once one failed or took long."""
    forced: deque[int] = field(default_factory=deque)
    """The tokens that must follow, as far as they are known."""
    is_slow: bool = False
    """True means that a thread beside the steps computes the masks, and alone uses `matcher`."""
    unread: list[int] = field(default_factory=list)
    """Tokens that `matcher` has not consumed yet; none unless the masks are slow."""
    ready: npt.NDArray[np.int32] | None = None
    """The next mask, if it is known before the step; that of the first token always is."""
    has_failed: bool = False
    """True means that the thread has found that the grammar cannot be followed any further."""

    def slow_down(self) -> None:
        """Leave the masks, from the next one on, to the thread beside the steps, and follow no more proposals."""
        self.is_slow, self.ahead = True, None
        self.forced.clear()

    def finish(self) -> str:
        """Compute the next mask and keep it in `ready`. Return why the grammar cannot be followed any further, or an
        empty string if it can. Called by the thread beside the steps."""
        words = np.empty_like(self.stops)
        self._fill(words, self.matcher, self.num_early)
        if self.matcher.is_error():
            self.has_failed = True
            return reason(self.matcher)
        self.ready = words
        return ""

    def fill(self, lines: Sequence[npt.NDArray[np.int32]], proposals: Sequence[int] = ()) -> int:
        """Overwrite each of `lines` (int32 [num_words]) with the mask of the tokens allowed next, and after each of
        `proposals`. Return how many proposals may be kept; later lines allow all. A slow row needs `ready`, and keeps
        none."""
        if self.ready is None:
            self._fill(lines[0], self.matcher, self.num_early)
        else:
            lines[0][:] = self.ready
        kept = self._look_ahead(self.ahead, lines[1:], proposals) if proposals and self.ahead else 0
        for line in lines[1 + kept :]:
            line[:] = -1
        return kept

    def _look_ahead(self, ahead: LLMatcher, lines: Sequence[npt.NDArray[np.int32]], proposals: Sequence[int]) -> int:
        kept, began, is_quick = 0, time.thread_time(), True
        for line, token in zip(lines, proposals, strict=True):
            if ahead.is_stopped() or not is_quick or not ahead.try_consume_tokens([token]):
                break
            kept += 1
            self._fill(line, ahead, self.num_early - kept)
            is_quick = time.thread_time() - began <= AHEAD_SECONDS
        if ahead.is_error() or not ahead.rollback(kept):
            self.ahead = None
            return max(0, kept - 1)
        if not is_quick:
            self.ahead = None
        return kept

    def _fill(self, words: npt.NDArray[np.int32], matcher: LLMatcher, num_early: int) -> None:
        fill_next_token_bitmask(matcher, words[None])
        if matcher.is_error():
            words[:] = -1
        else:
            self._ban_early(words, num_early)

    def _ban_early(self, words: npt.NDArray[np.int32], num_early: int) -> None:
        if num_early > 0 and (later := words & ~self.stops).any():
            words[:] = later

    def start(self, first: npt.NDArray[np.int32], answer: list[int]) -> None:
        """Follow the tokens of the answer so far, or take over the mask of the first token if there are none. Tokens of
        a slow grammar are consumed later."""
        if not answer:
            self.ready = first.copy()
            self._ban_early(self.ready, self.num_early)
        elif self.is_slow:
            self.unread = answer
        else:
            self.matcher.consume_tokens(answer)
            if self.ahead is not None:
                self.ahead.consume_tokens(answer)

    def advance(self, token: int) -> str:
        """Advance the request's matcher by a sampled token, and decrements `num_early`. Return why the grammar cannot
        be followed any further, or an empty string if it can."""
        self.num_early -= 1
        self.ready = None
        if self.is_slow:
            self.unread.append(token)
            return ""
        if self.forced and self.forced.popleft() != token:
            self.forced.clear()
        if self.ahead is not None and not self.ahead.consume_token(token):
            self.ahead = None
        return "" if self.matcher.consume_token(token) else reason(self.matcher)

    def following(self) -> tuple[int, ...]:
        """Return the tokens that the grammar forces next, at most MOST_FORCED; none if the request follows no
        proposals. They are computed together with all that must follow these: for a long constant of a schema, that
        takes milliseconds."""
        if self.ahead is None:
            return ()
        if not self.forced:
            self.forced.extend(self.ahead.compute_ff_tokens())
        return tuple(islice(self.forced, MOST_FORCED))


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
        self._rows: dict[str, _GrammarRow] = {}
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
        row = _GrammarRow(params.grammar, compiled.matcher.deep_copy(), num_early, stops, compiled.cost)
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
        tokenizer makes of this text, at most MOST_FORCED. Masks also allow other tokens for the same text."""
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
