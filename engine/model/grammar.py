"""Grammars at work: prepared in threads, kept for a while, and one matcher for each running request that has one.

What a request's grammar allows next becomes a mask over the logits; the token that was chosen moves its matcher on. A
request that was preempted gets a fresh matcher, which is shown the tokens it has generated.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import structlog
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask

from engine.core.commands import GrammarAnswer, GrammarFailed, GrammarReady
from engine.core.grammars import Grammar
from engine.core.types import SampledToken, SamplingParams
from engine.executor.base import Report
from engine.grammar_check.job import THREAD_STACK_BYTES
from engine.model.grammar_compiler import Compiler, Unproven, reason
from engine.model.masks import TokenMasks, num_words, pack_bits
from engine.model.sampler import stops_of

log = structlog.get_logger("grammar")

KEPT = 64
"""Grammars that no request uses and that a later request may ask for again."""
KEPT_BYTES = 256 << 20
"""Memory that those may hold, by their sizes when they were compiled. Typical grammars hold 1 MB, large ones 10 MB. The
core bounds what the grammars of live requests hold."""
THREADS = 2


class GrammarCache:
    """Compiled grammars by their texts: those in use, and those used last.

    All methods are called from one thread. `report` is called from the threads that compile.
    """

    def __init__(self, compiler: Compiler, report: Report) -> None:
        self._compiler = compiler
        self._report = report
        self._threads = ThreadPoolExecutor(THREADS, "grammar")
        self._compiled: dict[Grammar, Future[tuple[LLMatcher, int]]] = {}
        """The one asked for longest ago first."""
        self._wanted: set[Grammar] = set()
        self._spent: set[Grammar] = set()

    def begin(self, grammar: Grammar) -> None:
        """Reports once, now or later, that it is ready or has failed, unless it is forgotten before."""
        future = self._compiled.pop(grammar, None)
        if future is None:
            with _stack_size(THREAD_STACK_BYTES):
                future = self._threads.submit(self._compiler.compile, grammar)
        self._compiled[grammar] = future
        self._wanted.add(grammar)
        future.add_done_callback(lambda done: None if done.cancelled() else self._report(_answer(grammar, done)))

    def forget(self, grammar: Grammar) -> None:
        """No request uses the grammar now. It is not compiled at all if that has not begun."""
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

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """A new matcher of a grammar that was reported to be ready."""
        return self._compiled[grammar].result()[0].deep_copy()

    def _num_bytes(self, grammar: Grammar) -> int:
        """Bytes that a compiled grammar holds; 0 while it is compiled, or if it failed."""
        future = self._compiled[grammar]
        return future.result()[1] if future.done() and future.exception() is None else 0

    def discard(self, grammar: Grammar) -> None:
        """It is not kept when its users have ended: matchers of a grammar share what has become too much for one."""
        self._spent.add(grammar)


@contextmanager
def _stack_size(num_bytes: int) -> Iterator[None]:
    """Have threads that start inside the block start with a stack of this size. It is a setting of the process, so a
    thread that another one starts meanwhile may get the same."""
    before = threading.stack_size(num_bytes)
    try:
        yield
    finally:
        threading.stack_size(before)


def _may_pass(future: Future[tuple[LLMatcher, int]]) -> bool:
    """The failure is not the grammar's for ever, so that it must not be kept. The worker pool remembers what it may."""
    return future.done() and isinstance(future.exception(), Unproven)


def _answer(grammar: Grammar, done: Future[tuple[LLMatcher, int]]) -> GrammarAnswer:
    error = done.exception()
    if error is None:
        return GrammarReady(grammar, done.result()[1])
    if not isinstance(error, ValueError):  # a bug, but the requests that wait must be told
        log.error("grammar_failed", kind=grammar.kind.value, trace="".join(traceback.format_exception(error)))
        return GrammarFailed(grammar, "it could not be compiled")
    return GrammarFailed(grammar, str(error))


@dataclass(slots=True)
class _Row:
    """A running request that follows a grammar.

    stops: bits of the tokens that must not come before `num_early` more have come, as long as there are others.
    """

    grammar: Grammar
    matcher: LLMatcher
    num_early: int
    stops: npt.NDArray[np.int32]

    def fill(self, words: npt.NDArray[np.int32]) -> None:
        """What may come next, one bit a token. Everything, where the grammar has become too much."""
        fill_next_token_bitmask(self.matcher, words[None])
        if self.matcher.is_error():
            words[:] = -1
        elif self.num_early > 0 and (later := words & ~self.stops).any():
            words[:] = later

    def advance(self, token: int) -> str:
        """Why the grammar cannot be followed any further; empty if it can."""
        self.num_early -= 1
        return "" if self.matcher.consume_token(token) else reason(self.matcher)


class GrammarRoom:
    """Everything about grammars that an executor has to do; called from its thread alone."""

    def __init__(self, compiler: Compiler, vocab_size: int, eos_token_ids: tuple[int, ...], report: Report) -> None:
        self._cache = GrammarCache(compiler, report)
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._rows: dict[str, _Row] = {}

    def prepare(self, forgotten: Sequence[Grammar], prepared: Sequence[Grammar]) -> None:
        for grammar in forgotten:
            self._cache.forget(grammar)
        for grammar in prepared:
            self._cache.begin(grammar)

    def add(self, request_id: str, params: SamplingParams, tokens: Sequence[int], num_prompt: int) -> SamplingParams:
        """A request begins or resumes to run. Returns what a sampler is left to see to."""
        if params.grammar is None:
            return params
        matcher = self._cache.matcher(params.grammar)
        matcher.consume_tokens(list(tokens[num_prompt:]))
        num_early = params.min_tokens - (len(tokens) - num_prompt)
        stops = pack_bits(stops_of(params, self._eos_token_ids, self._vocab_size), self._vocab_size)
        self._rows[request_id] = _Row(params.grammar, matcher, num_early, stops)
        return params._replace(min_tokens=0)

    def remove(self, request_id: str) -> None:
        """One without a grammar is none to forget."""
        self._rows.pop(request_id, None)

    def bind(self, request_ids: Sequence[str]) -> bool:
        """Some of them follow one."""
        return not self._rows.keys().isdisjoint(request_ids)

    def masks(self, request_ids: Sequence[str]) -> TokenMasks | None:
        """What the next tokens of requests may be; None where all may be anything."""
        places = [place for place, request_id in enumerate(request_ids) if request_id in self._rows]
        if not places:
            return None
        words = np.empty((len(places), num_words(self._vocab_size)), dtype=np.int32)
        for line, place in zip(words, places, strict=True):
            self._rows[request_ids[place]].fill(line)
        return TokenMasks(tuple(places), words)

    def advance(self, sampled: Sequence[SampledToken]) -> dict[str, str]:
        """Takes up what was chosen. Returns the requests that cannot go on, and why."""
        failed = {}
        for request_id, token, _ in sampled:
            row = self._rows.get(request_id)
            if row is not None and (why := row.advance(token)):
                self._cache.discard(row.grammar)
                failed[request_id] = why
        return failed
