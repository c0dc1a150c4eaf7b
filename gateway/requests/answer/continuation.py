"""What one answer has so far, and the request for what is missing of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from engine.core.messages.prompt_logprobs import row_bytes
from engine.core.messages.requests import Request, TokenEvent

LEAST_DEADLINE_SECONDS = 0.001


class Continuation:
    """The request of an answer and what earlier engine processes have computed of it. Each submission to an engine
    process begins another part of the answer."""

    def __init__(self, request: Request) -> None:
        self.request = request
        """The request as its caller wants it. The parts of an answer may have different limits, so it can be set."""
        self.produced: list[int] = []
        """Tokens of the answer so far."""
        self._scored_bytes = 0
        """Number of bytes of prompt log probabilities that have come."""
        self._num_parts = 0
        """Number of times that the request was submitted to an engine process."""
        self._now = asyncio.get_running_loop().time
        self._began = self._now()

    def next_request(self, *, suspect: bool) -> Request:
        """Return the request for the next part: the original one or, if an engine process has had it, a copy that goes
        on after the tokens produced so far, with an id of its own. `suspect` is set in the copy."""
        if not self._num_parts:
            return self.request
        request = self.request
        deadline = request.deadline
        if deadline is not None:
            deadline = max(LEAST_DEADLINE_SECONDS, deadline - (self._now() - self._began))
        return request._replace(
            id=f"{request.id}+{self._num_parts}",
            produced=tuple(self.produced),
            num_scored=self._scored_bytes // row_bytes(request.params.prompt_logprobs or 0),
            moves=self._num_parts,
            suspect=suspect,
            deadline=deadline,
        )

    def note_submitted(self) -> None:
        """Record that an engine process has got the request for the next part."""
        self._num_parts += 1

    def note_events(self, events: Iterable[TokenEvent]) -> None:
        """Record the tokens and prompt log probabilities of events."""
        for event in events:
            self.produced += event.tokens
            self._scored_bytes += len(event.prompt_logprobs)
