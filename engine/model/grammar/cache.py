"""The compiled grammars of one executor: compiled in threads, and kept for later requests."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import structlog

from engine.core.messages.commands import GrammarAnswer, GrammarFailed, GrammarReady
from engine.core.messages.grammar import Grammar
from engine.executor.base import Report
from engine.grammar_check.job import THREAD_STACK_BYTES
from engine.model.grammar.compiler import Compiled, Compiler, Unproven

log = structlog.get_logger("grammar")

KEPT = 64
"""Maximum number of grammars that are kept, for later requests, while no request uses them."""
KEPT_BYTES = 256 << 20
"""Maximum memory of the unused grammars that are kept, in bytes, by their sizes when they were compiled. Typical
grammars hold 1 MB, large ones 10 MB. The core bounds the memory of grammars that live requests use."""
THREADS = 2


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
        """Compile a grammar in a thread unless it is cached. Reports once, now or later, that the grammar is ready or
        has failed; does not report if the grammar is forgotten before its compilation begins."""
        future = self._compiled.pop(grammar, None)
        if future is None:
            with stack_size(THREAD_STACK_BYTES):
                future = self._threads.submit(self._compiler.compile, grammar)
        self._compiled[grammar] = future
        self._wanted.add(grammar)
        future.add_done_callback(lambda done: None if done.cancelled() else self._report(_answer(grammar, done)))

    def forget(self, grammar: Grammar) -> None:
        """Note that no request uses the grammar any more. Drops it if it was discarded, its compilation has not begun
        or its failure may be temporary, and the least recently requested unused ones beyond KEPT and KEPT_BYTES."""
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
        """Return the compiled form of a grammar that was reported to be ready."""
        return self._compiled[grammar].result()

    def _num_bytes(self, grammar: Grammar) -> int:
        """Return the bytes that a compiled grammar holds; 0 while it is being compiled, or if it failed."""
        future = self._compiled[grammar]
        return future.result().num_bytes if future.done() and future.exception() is None else 0

    def discard(self, grammar: Grammar) -> None:
        """Make the next `forget` drop the compiled grammar. It is called when one of the grammar's matchers has failed,
        for example at a limit of a state that all of them share."""
        self._spent.add(grammar)


@contextmanager
def stack_size(num_bytes: int) -> Iterator[None]:
    """Give threads that start inside the block a stack of `num_bytes`, and restore the previous size on exit. It is a
    setting of the process, so threads that other threads start meanwhile may get that stack too."""
    before = threading.stack_size(num_bytes)
    try:
        yield
    finally:
        threading.stack_size(before)


def _may_pass(future: Future[Compiled]) -> bool:
    """Return whether a compilation failed for a reason that may be temporary (`Unproven`). Such a failure is not cached
    here; the worker pool may cache it."""
    return future.done() and isinstance(future.exception(), Unproven)


def _answer(grammar: Grammar, done: Future[Compiled]) -> GrammarAnswer:
    error = done.exception()
    if error is None:
        return GrammarReady(grammar, done.result().num_bytes)
    if not isinstance(error, ValueError):  # a bug, but the requests that wait must be told
        log.error("grammar_failed", kind=grammar.kind.value, trace="".join(traceback.format_exception(error)))
        return GrammarFailed(grammar, "it could not be compiled")
    return GrammarFailed(grammar, str(error))
