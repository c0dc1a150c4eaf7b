"""A running request that follows a grammar: its matcher, and what its masks take."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask

from engine.core.messages.grammar import Grammar
from engine.model.grammar.compiler import reason
from engine.model.grammar.mask_cost import MaskCost

AHEAD_SECONDS = 0.005
"""Maximum processor time in seconds for following a request's proposals in a step. Once it is exceeded, no more
proposals of the request are followed, in this step and later. Sixteen usually take 0.3 ms; a hostile grammar can take
0.1 s for a token. Once the masks of a step have taken that long, the step follows no more proposals."""
MOST_FORCED = 16
"""Maximum number of forced tokens that are reported: as many as a step can compute (`engine.core.plan.proposals`)."""


@dataclass(slots=True)
class GrammarRow:
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
