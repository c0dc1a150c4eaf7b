"""The event stream to one gateway. Tokens that a client waits for are sent after each step; others are gathered. A
gateway that does not read loses its session before the unread events fill the memory."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from engine.core.messages.requests import TokenEvent
from engine.pb import engine_pb2 as pb
from engine.rpc.coalesce import merge_events
from engine.rpc.wire import event_to_pb

MAX_EVENTS = 1024
"""Maximum number of events gathered into one message for a gateway that reads slowly, before events of the same request
are merged; the last step may exceed it."""
MAX_UNREAD = 400_000
"""Maximum size, as `_size` counts it, of the events that a gateway may leave unread. An event takes 230 to 380 bytes
and an alternative token of its logprobs 130, so that a gateway costs at most 150 MB. At 25,000 tokens a second, a GPU's
worth, this is 16 s: longer than a partition goes unnoticed, and than a gateway that works ever pauses."""
PIECE_BYTES = 256
"""Bytes of an embedding vector or of prompt logprobs that count as one event towards `MAX_UNREAD`."""
HOLD_SECONDS = 0.05
"""Seconds for which tokens of answers that clients want whole are held back and gathered. Sent at once, with a step
every 2 ms, they cost a gateway 280 us a step for one request and 420 us for sixteen; held back, 31 us and 41 us."""


class GatewaySession:
    """Queue of events about the requests of one gateway, for as long as its `Session` call lasts, or of the program
    that runs the engine in its own process. The step loop calls `put`; another thread calls `messages` or `steps`."""

    def __init__(self, peer: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        """`peer` is the gateway's address, for the log. `clock` returns monotonic seconds."""
        self.peer = peer
        self.ended = False
        self.overflowed = False
        """True once the gateway has left too many events unread."""
        self.fetches: set[str] = set()
        """Ids of requests whose KV is fetched ahead, until the gateway submits or drops them."""
        self._outbox: queue.SimpleQueue[tuple[list[TokenEvent], int, bool] | None] = queue.SimpleQueue()
        """(events of a step, their size, whether a client waits for any of them), the oldest step first. None ends the
        stream."""
        self._whole: dict[str, bool] = {}
        """Id of each live request whose client wants the answer whole -> whether its first token was sent."""
        self._clock = clock
        self._num_put = 0
        """Size of all events that were queued. Only the step loop changes it."""
        self._num_taken = 0
        """Size of all events that were taken from the queue. Only the thread that sends them changes it."""

    def expect(self, request_id: str, *, whole: bool) -> None:
        """Announce a request before its events. `whole` means that its client wants the answer whole, so that tokens
        between the first and the last may be held back."""
        if whole:
            self._whole[request_id] = False

    def put(self, events: list[TokenEvent]) -> bool:
        """Queue the events that one step has for this gateway; `messages` yields them. Return False if too many are
        unread: all are dropped then, and the session ends."""
        size = _size(events)
        self._num_put += size
        if self._num_put - self._num_taken > MAX_UNREAD:
            self._overflow()
            return False
        waited_for = [self._is_waited_for(event) for event in events]
        self._outbox.put((events, size, any(waited_for)))
        return True

    def end(self) -> None:
        self._outbox.put(None)

    def messages(self) -> Iterator[pb.StepEvents]:
        """Yield the lists of events of `steps`, each converted to a protobuf message."""
        for events in self.steps():
            yield pb.StepEvents(events=map(event_to_pb, events))

    def steps(self) -> Iterator[list[TokenEvent]]:
        """Yield lists of events until `end` is called: one for each step, or one for several, with each request's
        events merged, if the reader is slow or no client waits for their tokens."""
        is_open = True
        while is_open:
            events, is_open = self._gathered()
            if events:
                yield merge_events(events)

    def _gathered(self) -> tuple[list[TokenEvent], bool]:
        """Wait for events; return (events, whether the session goes on): all that are queued and, while no client
        waits for any, those of the next `HOLD_SECONDS`, up to about `MAX_EVENTS`."""
        events: list[TokenEvent] = []
        until = 0.0
        """Time on the clock until which further events are gathered; 0 means until the queue is empty."""
        while len(events) < MAX_EVENTS:
            try:
                step = self._outbox.get(timeout=max(0.0, until - self._clock()) if events else None)
            except queue.Empty:
                break
            if step is None:
                return events, False
            told, size, is_waited_for = step
            self._num_taken += size
            if is_waited_for:
                until = 0.0
            elif not events:
                until = self._clock() + HOLD_SECONDS
            events += told
        return events, True

    def _overflow(self) -> None:
        self.overflowed = True
        with suppress(queue.Empty):
            while True:
                self._outbox.get_nowait()
        self.end()

    def _is_waited_for(self, event: TokenEvent) -> bool:
        """Record a request's progress by an event, and return whether a client waits for the event: always, except for
        tokens between the first and the last of an answer that is wanted whole."""
        has_begun = self._whole.get(event.request_id)
        if has_begun is None:
            return True
        if event.finish_reason is not None:
            del self._whole[event.request_id]
            return True
        self._whole[event.request_id] = has_begun or bool(event.tokens)
        return not has_begun


def _size(events: list[TokenEvent]) -> int:
    """Return the size of events as `MAX_UNREAD` limits it: one for each event and for each alternative token in its
    logprobs, and one for each `PIECE_BYTES` bytes of embedding vectors and prompt logprobs."""
    size, num_bytes = len(events), 0
    for event in events:  # once a token: generator expressions over all of them took the engine a microsecond
        if event.logprobs:
            size += sum(len(token.top) for token in event.logprobs)
        if event.vector or event.prompt_logprobs:
            num_bytes += len(event.vector) + len(event.prompt_logprobs)
    return size + num_bytes // PIECE_BYTES
