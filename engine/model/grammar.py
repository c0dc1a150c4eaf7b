"""Grammars of running requests: compiled in threads, cached, and followed by one matcher for each request.

A request's matcher yields a mask over the logits, with the tokens that the grammar allows next, and is advanced by the
token that was sampled. The new matcher of a request that was preempted first consumes the tokens generated so far.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import structlog
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask

from engine.core.commands import GrammarAnswer, GrammarFailed, GrammarReady
from engine.core.grammars import Grammar
from engine.core.step import SampledToken
from engine.core.types import SamplingParams
from engine.executor.base import Report
from engine.grammar_check.job import THREAD_STACK_BYTES
from engine.model.grammar_compiler import Compiled, Compiler, Unproven, reason
from engine.model.masks import TokenMasks, num_words, pack_bits
from engine.model.sampler import stops_of

log = structlog.get_logger("grammar")

KEPT = 64
"""Maximum number of grammars that are kept, for later requests, while no request uses them."""
KEPT_BYTES = 256 << 20
"""Maximum memory of the unused grammars that are kept, in bytes, by their sizes when they were compiled. Typical
grammars hold 1 MB, large ones 10 MB. The core bounds the memory of grammars that live requests use."""
THREADS = 2
AHEAD_SECONDS = 0.005
"""Maximum processor time in seconds for following a request's proposals in a step. Once it is exceeded, no more
proposals of the request are followed, in this step and later. Sixteen usually take 0.3 ms; a hostile grammar can take
0.1 s for a token."""
MOST_FORCED = 16
"""Maximum number of forced tokens that are reported: as many as a step can compute (`engine.core.proposals`)."""


class GrammarCache:
    """Cache of compiled grammars: those in use, and the most recently requested others, at most KEPT and KEPT_BYTES.
    All methods are called from one thread. `report` is called from the threads that compile, or within `begin`."""

    def __init__(self, compiler: Compiler, report: Report) -> None:
        self._compiler = compiler
        self._report = report
        self._threads = ThreadPoolExecutor(THREADS, "grammar")
        self._compiled: dict[Grammar, Future[Compiled]] = {}
        """The compilation of each grammar in use or cached. The least recently requested grammar comes first."""
        self._wanted: set[Grammar] = set()
        self._spent: set[Grammar] = set()

    def begin(self, grammar: Grammar) -> None:
        """Compiles a grammar in a thread unless it is cached. Reports once, now or later, that the grammar is ready or
        has failed; does not report if the grammar is forgotten before its compilation begins."""
        future = self._compiled.pop(grammar, None)
        if future is None:
            with _stack_size(THREAD_STACK_BYTES):
                future = self._threads.submit(self._compiler.compile, grammar)
        self._compiled[grammar] = future
        self._wanted.add(grammar)
        future.add_done_callback(lambda done: None if done.cancelled() else self._report(_answer(grammar, done)))

    def forget(self, grammar: Grammar) -> None:
        """Note that no request uses the grammar any more. Drops the grammar if `discard` was called for it, if its
        compilation has not begun, or if its failure may be temporary. Then drops the least recently requested unused
        grammars beyond KEPT and KEPT_BYTES."""
        self._wanted.discard(grammar)
        future = self._compiled[grammar]
        if grammar in self._spent or future.cancel() or _may_pass(future):
            self._spent.discard(grammar)
            del self._compiled[grammar]
        idle = [one for one in self._compiled if one not in self._wanted]
        held = sum(map(self._num_bytes, idle))
        for place, one in enumerate(idle):
            if len(idle) - place <= KEPT and held <= KEPT_BYTES:
                break
            held -= self._num_bytes(one)
            del self._compiled[one]

    def compiled(self, grammar: Grammar) -> Compiled:
        """Returns the compiled form of a grammar that was reported to be ready."""
        return self._compiled[grammar].result()

    def _num_bytes(self, grammar: Grammar) -> int:
        """Returns the bytes that a compiled grammar holds; 0 while it is being compiled, or if it failed."""
        future = self._compiled[grammar]
        return future.result().num_bytes if future.done() and future.exception() is None else 0

    def discard(self, grammar: Grammar) -> None:
        """Makes the next `forget` drop the compiled grammar. It is called when one of the grammar's matchers has
        failed, for example at a limit of a state that all of them share."""
        self._spent.add(grammar)


@contextmanager
def _stack_size(num_bytes: int) -> Iterator[None]:
    """Give threads that start inside the block a stack of `num_bytes`, and restore the previous size on exit. It is a
    setting of the process, so threads that other threads start meanwhile may get that stack too."""
    before = threading.stack_size(num_bytes)
    try:
        yield
    finally:
        threading.stack_size(before)


def _may_pass(future: Future[Compiled]) -> bool:
    """Returns whether a compilation failed for a reason that may be temporary (`Unproven`). Such a failure is not
    cached here; the worker pool may cache it."""
    return future.done() and isinstance(future.exception(), Unproven)


def _answer(grammar: Grammar, done: Future[Compiled]) -> GrammarAnswer:
    error = done.exception()
    if error is None:
        return GrammarReady(grammar, done.result().num_bytes)
    if not isinstance(error, ValueError):  # a bug, but the requests that wait must be told
        log.error("grammar_failed", kind=grammar.kind.value, trace="".join(traceback.format_exception(error)))
        return GrammarFailed(grammar, "it could not be compiled")
    return GrammarFailed(grammar, str(error))


@dataclass(slots=True)
class _GrammarRow:
    """A running request that follows a grammar.

    Attributes:
        num_early: number of tokens that must still come before a stop token may; negative once there are more.
        stops: bit mask of the stop tokens. They are banned while `num_early` is positive and other tokens are allowed.
        ahead: a second matcher, which consumes proposals and is rolled back. It shares nothing with `matcher`, so that
            guesses cannot make the request fail. None means that no proposals are followed: without speculation, with
            penalties, and no more once one failed or took long.
        forced: the tokens that must follow, as far as they are known.
    """

    grammar: Grammar
    matcher: LLMatcher
    num_early: int
    stops: npt.NDArray[np.int32]
    ahead: LLMatcher | None = None
    forced: deque[int] = field(default_factory=deque)

    def fill(self, lines: Sequence[npt.NDArray[np.int32]], proposals: Sequence[int] = ()) -> int:
        """Overwrites each of `lines` (int32 [num_words]) with a mask, one bit for each token: the first with the tokens
        allowed next, those after it with the tokens allowed after each of `proposals`. Returns how many proposals may
        be kept: those that the grammar allows, as far as it is followed quickly. The lines after these allow all
        tokens, and so does the first one if the matcher has failed."""
        self._fill(lines[0], self.matcher, self.num_early)
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
        elif num_early > 0 and (later := words & ~self.stops).any():
            words[:] = later

    def advance(self, token: int) -> str:
        """Advances the request's matcher by a sampled token, and decrements `num_early`. Returns why the grammar cannot
        be followed any further, or an empty string if it can."""
        self.num_early -= 1
        if self.forced and self.forced.popleft() != token:
            self.forced.clear()
        if self.ahead is not None and not self.ahead.consume_token(token):
            self.ahead = None
        return "" if self.matcher.consume_token(token) else reason(self.matcher)

    def following(self) -> tuple[int, ...]:
        """Returns the tokens that the grammar forces next, at most MOST_FORCED; none if the request follows no
        proposals. They are computed together with all that must follow these: for a long constant of a schema, that
        takes milliseconds."""
        if self.ahead is None:
            return ()
        if not self.forced:
            self.forced.extend(self.ahead.compute_ff_tokens())
        return tuple(islice(self.forced, MOST_FORCED))


def _follow(matcher: LLMatcher, answer: list[int]) -> LLMatcher:
    """Returns a copy of a matcher that has consumed the tokens of an answer."""
    copy = matcher.deep_copy()
    copy.consume_tokens(answer)
    return copy


class GrammarEnd(NamedTuple):
    """Why a request's grammar cannot be followed any further, and how many of the step's tokens still followed it."""

    reason: str
    num_followed: int


class GrammarRoom:
    """The grammars of one executor: compiles them, and holds a matcher for each running request that follows one. Must
    be called from the executor's thread only. `report` receives the outcome of each compilation."""

    def __init__(self, compiler: Compiler, vocab_size: int, eos_token_ids: tuple[int, ...], report: Report) -> None:
        self._cache = GrammarCache(compiler, report)
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._rows: dict[str, _GrammarRow] = {}

    def prepare(self, forgotten: Sequence[Grammar], prepared: Sequence[Grammar]) -> None:
        for grammar in forgotten:
            self._cache.forget(grammar)
        for grammar in prepared:
            self._cache.begin(grammar)

    def add(self, request_id: str, params: SamplingParams, tokens: Sequence[int], num_prompt: int) -> SamplingParams:
        """Adds a request that begins or resumes, if it has a grammar: a new matcher of the grammar, which must be
        ready, consumes `tokens[num_prompt:]`. Returns the parameters that the sampler still has to apply: without
        `min_tokens` if the request has a grammar, because the masks then enforce it."""
        if params.grammar is None:
            return params
        compiled, answer = self._cache.compiled(params.grammar), list(tokens[num_prompt:])
        matcher, speculates = _follow(compiled.matcher, answer), params.speculates and not params.has_penalties
        ahead = _follow(compiled.guesses, answer) if compiled.guesses and speculates else None
        num_early = params.min_tokens - (len(tokens) - num_prompt)
        stops = pack_bits(stops_of(params, self._eos_token_ids, self._vocab_size), self._vocab_size)
        self._rows[request_id] = _GrammarRow(params.grammar, matcher, num_early, stops, ahead)
        return params._replace(min_tokens=0)

    def remove(self, request_id: str) -> None:
        """Drops a request's grammar matcher. Does nothing if the request has no grammar."""
        self._rows.pop(request_id, None)

    def bind(self, request_ids: Sequence[str]) -> bool:
        """Returns whether any of these requests follows a grammar. If so, the step needs `masks`, and the host must
        first have read the tokens of all steps before it. Changes nothing."""
        return not self._rows.keys().isdisjoint(request_ids)

    def masks(
        self, request_ids: Sequence[str], proposals: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    ) -> tuple[TokenMasks | None, dict[str, tuple[int, ...]]]:
        """Returns masks of the tokens that grammars allow in the rows of a step, and the proposals of each request that
        may be kept. Row i is of `request_ids[i]`; a request with `proposals` is listed once more for each of them. None
        in place of masks means that no request follows a grammar."""
        places = [place for place, request_id in enumerate(request_ids) if request_id in self._rows]
        kept = dict(proposals)
        if not places:
            return None, kept
        words = np.empty((len(places), num_words(self._vocab_size)), dtype=np.int32)
        lines: dict[str, list[npt.NDArray[np.int32]]] = {}
        for line, place in zip(words, places, strict=True):
            lines.setdefault(request_ids[place], []).append(line)
        for request_id, own in lines.items():
            guess = proposals.get(request_id, ())
            count = self._rows[request_id].fill(own, guess)
            if guess:
                kept[request_id] = guess[:count]
        return TokenMasks(tuple(places), words), kept

    def forced(self, request_ids: Iterable[str]) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Returns (request id, tokens) for each request whose grammar leaves only one text to come: the tokens that the
        tokenizer makes of this text, at most MOST_FORCED. Masks also allow other tokens for the same text."""
        found = {name: self._rows[name].following() for name in request_ids if name in self._rows}
        return tuple((name, tokens) for name, tokens in found.items() if tokens)

    def advance(self, sampled: Sequence[SampledToken]) -> dict[str, GrammarEnd]:
        """Advances matchers by the sampled tokens, each up to its first failure. Returns id -> end for the requests
        that cannot continue; their grammars will not be cached."""
        ends: dict[str, GrammarEnd] = {}
        taken: Counter[str] = Counter()
        for request_id, token, _ in sampled:
            row = self._rows.get(request_id)
            if row is None or request_id in ends:
                continue
            if why := row.advance(token):
                self._cache.discard(row.grammar)
                ends[request_id] = GrammarEnd(why, taken[request_id])
            taken[request_id] += 1
        return ends
