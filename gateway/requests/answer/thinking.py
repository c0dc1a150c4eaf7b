"""Ends the reasoning of an answer after a number of tokens.

The engine computes such an answer in two parts: first at most as many tokens as the budget has, then the rest, in a
request that continues the first one. If the answer is still reasoning after the first part, the closing mark is put
between the two. The engine keeps the pages of the first part in its prefix cache, so that the second part costs one
admission and the recomputation of less than a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from engine.core.messages.requests import FinishReason, Request, TokenEvent, TokenLogprobs
from gateway.requests.answer.resumption import Continuation, ResumingStream
from gateway.text.reasoning.parser import Thinking
from gateway.text.tokenizer import Tokenizer

CERTAIN = TokenLogprobs(0.0)
"""Log probability (0) of the tokens of a closing mark that the gateway puts into an answer; the model did not draw
them."""


class ThinkingBudget:
    """The most tokens that the reasoning of one answer may have, with the marks around it."""

    def __init__(self, tokens: int, thinking: Thinking, closing: tuple[int, ...], tokenizer: Tokenizer) -> None:
        """`closing` has the token ids of the closing mark."""
        self._tokens = tokens
        self._thinking = thinking
        self._closing = closing
        self._tokenizer = tokenizer

    def applies_to(self, request: Request) -> bool:
        """Return whether an answer may have more tokens than the budget and the closing mark."""
        return request.params.max_tokens > self._tokens + len(self._closing)

    def first_part(self, request: Request) -> Request:
        """Return a copy of the request for the first part of its answer, which has at most as many tokens as the
        budget."""
        params = request.params
        return request._replace(
            params=params._replace(max_tokens=self._tokens, min_tokens=min(params.min_tokens, self._tokens))
        )

    def ends(self, produced: Sequence[int]) -> bool:
        """Return whether an answer that ended with FinishReason.LENGTH, after the tokens `produced`, has used up its
        first part, so that a second part follows."""
        return len(produced) == self._tokens

    def bridge(self, produced: Sequence[int], last: TokenEvent) -> TokenEvent:
        """Return the last event of the first part, without its end, and with the closing mark if the answer, whose
        tokens are `produced`, is still reasoning."""
        closing = self._closing if self._is_reasoning(produced) else ()
        logprobs = last.logprobs + (CERTAIN,) * len(closing) if last.logprobs else ()
        return last._replace(finish_reason=None, tokens=last.tokens + closing, logprobs=logprobs)

    def _is_reasoning(self, produced: Sequence[int]) -> bool:
        parser = self._thinking.parser()
        parser.push(self._tokenizer.decode(produced, skip_special=False))
        return parser.is_inside


class ThinkingStream:
    """The events of an answer with a thinking budget (see `ThinkingBudget`), both parts in turn."""

    def __init__(
        self, stream: ResumingStream, continuation: Continuation, whole: Request, budget: ThinkingBudget
    ) -> None:
        """`continuation` is that of `stream`, and has the request for the first part; `whole` is the request for the
        whole answer."""
        self._stream = stream
        self._continuation = continuation
        self._whole = whole
        self._budget = budget
        self._is_first_part = True

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[TokenEvent]:
        events = await anext(self._stream)
        if self._is_first_part and events[-1].finish_reason is FinishReason.LENGTH:
            return await self._bridged(events)
        return events

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def _bridged(self, events: list[TokenEvent]) -> list[TokenEvent]:
        """Return the events with `ThinkingBudget.bridge` in place of the end of the first part, and let the next read
        submit the second part; or return them as they are if they end the whole answer."""
        continuation, last = self._continuation, events[-1]
        if not self._budget.ends(continuation.produced):
            return events
        self._is_first_part = False
        await self._stream.end_part()
        bridge = self._budget.bridge(continuation.produced, last)
        continuation.produced += bridge.tokens[len(last.tokens) :]
        continuation.request = self._whole
        return [*events[:-1], bridge]
