"""Computes the masks that take too long for a step, in a thread beside the steps. The step loop uses a request's
matcher until its grammar proves slow, and then only this thread, because a matcher is locked meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import structlog

from engine.core.messages.commands import MaskAnswer, MaskFailed, MaskReady
from engine.grammar_check.job import THREAD_STACK_BYTES
from engine.model.grammar.cache import stack_size

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

log = structlog.get_logger("grammar")

MOST_SECONDS = 1.0
"""Seconds of a core's time that a mask may take at all. Within llguidance's limits, hostile grammars reach 0.25 s."""


class SlowRow(Protocol):
    """A request whose masks this thread computes: nothing else uses the row until the thread has answered."""

    unread: list[int]
    """Tokens that the matcher has not consumed yet."""

    @property
    def matcher(self) -> LLMatcher: ...

    def finish(self) -> str:
        """Compute the mask after the tokens that the matcher has consumed, and keep it. Return why the grammar cannot
        be followed any further; empty if it can."""


class MaskThread:
    """A thread that computes masks one after the other, from its first mask on. `idle` returns a matcher that is in an
    error state. `report` gets exactly one answer for each `begin`, from this thread."""

    def __init__(self, idle: Callable[[], LLMatcher], report: Callable[[MaskAnswer], None]) -> None:
        self._idle = idle
        self._report = report
        self._thread = ThreadPoolExecutor(1, "masks")
        self._consumer: tuple[LLExecutor, LLMatcher] | None = None

    def begin(self, request_id: str, row: SlowRow) -> None:
        with stack_size(THREAD_STACK_BYTES):
            self._thread.submit(self._compute, request_id, row)

    def close(self) -> None:
        """Drop the masks that have not begun, and wait for the one that has."""
        self._thread.shutdown(cancel_futures=True)

    def _compute(self, request_id: str, row: SlowRow) -> None:
        began, waited, why = time.thread_time(), 0.0, "it could not be followed"
        try:
            waited = self._consume(row)
            why = row.finish()
        except BaseException as error:  # also a panic of the library, which is not derived from Exception
            log.error("mask_failed", request=request_id, error=repr(error))
        seconds = time.thread_time() - began + waited
        if not why and seconds > MOST_SECONDS:
            why = f"its next token takes {seconds:.1f} s to find, and may take {MOST_SECONDS:.0f} s: make it simpler"
        self._report(MaskFailed(request_id, seconds, why) if why else MaskReady(request_id, seconds))

    def _consume(self, row: SlowRow) -> float:
        """Have the row's matcher consume the unread tokens, and return the seconds that it took."""
        # llguidance releases Python's lock only where several matchers consume at once: an idle one, which fails at
        # once, is added.
        began = time.perf_counter()
        if self._consumer is None:
            # Rust's threads have a quarter of the stack of the thread in which the grammar was compiled.
            os.environ.setdefault("RUST_MIN_STACK", str(THREAD_STACK_BYTES))
            from llguidance import LLExecutor  # here, because a machine without grammars may lack it

            self._consumer = LLExecutor(1), self._idle()
        executor, idle = self._consumer
        while row.unread and not row.matcher.is_error():
            executor.consume_token_par([(row.matcher, row.unread.pop(0)), (idle, 0)])
        return time.perf_counter() - began
