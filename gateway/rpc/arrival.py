"""Bounds the messages that are arriving over gRPC at the same time, by tenant and in all, and the time that each has.

The size of a message is known only when it is complete: gRPC hands it over as a whole, and buffers up to
`max_message_bytes` of it from the moment on at which the gateway begins to read it. So what is bounded is the number of
messages that are being read. Of a call whose message is not being read, gRPC takes LOOKAHEAD_BYTES and no more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.core.errors import ApiError, Fault, unavailable
from gateway.requests.wire_room import STRANGERS

LOOKAHEAD_BYTES = 64 * 2**10
"""Bytes that gRPC takes of a call before its message is read: HTTP/2's initial window."""
ARRIVAL_SECONDS = 60.0
"""Time that a message has to arrive: 140 KiB a second suffice for the largest."""
STRANGER_SECONDS = 20.0
"""The same for methods that need no key, health and reflection, whose messages are small."""
TENANT_MESSAGES = 16
"""Maximum messages of one tenant that are read at the same time: at most 128 MiB. Further calls wait. A message that
came together with its call's headers is read within a millisecond, so that a burst of small calls hardly waits."""
ALL_MESSAGES = 64
"""Maximum messages of all tenants together: at most 512 MiB. Each tenant may have one beyond that, so that the others
cannot keep it out."""
STRANGER_MESSAGES = 8
"""Maximum messages of all callers without a key together: at most 64 MiB. Beyond it the oldest gives way, because an
honest one is complete at once: strangers who send slowly cannot keep a health check out."""
MOST_WAITING = 1024
"""Maximum calls of one tenant that wait for their messages to be read: at most 64 MiB of LOOKAHEAD_BYTES each."""


class Arrival:
    """A call whose message is to arrive. `turn` is done when it may be read."""

    __slots__ = ("gave_way", "owner", "timeout", "turn")

    def __init__(self, owner: str, seconds: float) -> None:
        self.owner = owner
        self.timeout = asyncio.timeout(seconds)
        self.turn: asyncio.Future[None] | None = None
        self.gave_way = False

    def give_way(self) -> None:
        """End the arrival now, with an error for its caller."""
        self.gave_way = True
        self.timeout.reschedule(asyncio.get_running_loop().time())

    def refusal(self) -> ApiError:
        """Return the error for the caller after `timeout` has ended the arrival."""
        if self.gave_way:
            return unavailable(Fault.OVERLOADED, "too many callers without a key send messages at once; try again")
        if self.turn is not None and not self.turn.done():
            return _too_many()
        seconds = STRANGER_SECONDS if self.owner == STRANGERS else ARRIVAL_SECONDS
        return ApiError(Fault.DEADLINE_EXCEEDED, f"no whole message arrived within {seconds:g} s")


class ArrivingMessages:
    """Lets calls read their messages, few of each tenant at a time. One object for each server; used from the event
    loop's thread only."""

    def __init__(self) -> None:
        self._reading: dict[str, dict[Arrival, None]] = {}
        """Arrivals that are being read, by owner, the oldest first."""
        self._total = 0
        """Number of the tenants' arrivals that are being read."""
        self._waiting: dict[str, deque[Arrival]] = {}
        """Arrivals that wait, by owner, the first to be served first."""

    @asynccontextmanager
    async def reading(self, owner: str) -> AsyncIterator[None]:
        """Wait until a message of `owner`, a tenant's name or STRANGERS, may be read, which the block does. Raises
        ApiError: DEADLINE_EXCEEDED, the block took too long; RATE_LIMIT_EXCEEDED, too many of the tenant's calls send
        their messages; OVERLOADED, a stranger gave way to others."""
        arrival = Arrival(owner, STRANGER_SECONDS if owner == STRANGERS else ARRIVAL_SECONDS)
        try:
            async with arrival.timeout:
                try:
                    await self._begin(arrival)
                    yield
                finally:
                    self._end(arrival)
        except TimeoutError:
            raise arrival.refusal() from None

    async def _begin(self, arrival: Arrival) -> None:
        owner = arrival.owner
        if owner == STRANGERS:
            self._make_room_for_stranger()
        elif owner in self._waiting or not self._has_room(owner):
            await self._wait(arrival)
            return
        self._add(arrival)

    async def _wait(self, arrival: Arrival) -> None:
        queue = self._waiting.setdefault(arrival.owner, deque())
        if len(queue) >= MOST_WAITING:
            raise _too_many()
        arrival.turn = asyncio.get_running_loop().create_future()
        queue.append(arrival)
        await arrival.turn

    def _has_room(self, owner: str) -> bool:
        own = len(self._reading.get(owner, ()))
        return own < TENANT_MESSAGES and (own == 0 or self._total < ALL_MESSAGES)

    def _make_room_for_stranger(self) -> None:
        reading = self._reading.get(STRANGERS, {})
        if len(reading) >= STRANGER_MESSAGES:
            oldest = next(iter(reading))
            del reading[oldest]
            oldest.give_way()

    def _add(self, arrival: Arrival) -> None:
        self._reading.setdefault(arrival.owner, {})[arrival] = None
        self._total += arrival.owner != STRANGERS

    def _end(self, arrival: Arrival) -> None:
        """Forget an arrival, whether it was being read, waited or gave way, and let others be read in its place."""
        owner = arrival.owner
        if arrival in (own := self._reading.get(owner, {})):
            del own[arrival]
            self._total -= owner != STRANGERS
            if not own:
                del self._reading[owner]
        elif arrival in (queue := self._waiting.get(owner, deque())):
            queue.remove(arrival)
            if not queue:
                del self._waiting[owner]
        for waiting in list(self._waiting):
            if self._has_room(waiting):
                self._serve(waiting)

    def _serve(self, owner: str) -> None:
        """Let the tenant's first waiting call be read. Its others wait behind those of other tenants."""
        queue = self._waiting.pop(owner)
        arrival = queue.popleft()
        if queue:
            self._waiting[owner] = queue
        assert arrival.turn is not None, "it waits"
        if not arrival.turn.done():  # otherwise its call has just ended
            arrival.turn.set_result(None)
            self._add(arrival)


def _too_many() -> ApiError:
    message = f"{TENANT_MESSAGES} of your calls are sending their messages, and others wait; send fewer at once"
    return ApiError(Fault.RATE_LIMIT_EXCEEDED, message, retry_after=1.0, limit_kind="requests")
