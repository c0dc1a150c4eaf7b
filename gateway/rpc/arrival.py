"""Bounds the messages that arrive over gRPC at the same time, by tenant and in all, and their time. Sizes are known
only at the end, so their number is bounded; unread calls buffer LOOKAHEAD_BYTES."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import chain
from typing import TypeVar

from gateway.core.errors import ApiError, Fault, unavailable
from gateway.requests.wire_room import STRANGERS

T = TypeVar("T")

LOOKAHEAD_BYTES = 64 * 2**10
"""Bytes that gRPC takes of a call before its message is read: HTTP/2's initial window."""
ARRIVAL_SECONDS = 60.0
"""Time that a message has to arrive: 140 KiB a second suffice for the largest."""
STRANGER_SECONDS = 20.0
"""The same for methods that need no key, health and reflection, whose messages are small."""
LOOK_SECONDS = 1.0
"""Interval at which late messages are looked for, and so the maximum time by which one exceeds the above."""
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
    """A call whose message is to arrive before `due`, on the loop's clock."""

    __slots__ = ("due", "gave_way", "owner", "timeout", "turn")

    def __init__(self, owner: str) -> None:
        seconds = STRANGER_SECONDS if owner == STRANGERS else ARRIVAL_SECONDS
        self.owner = owner
        self.due = asyncio.get_running_loop().time() + seconds
        self.timeout = asyncio.timeout(None)
        self.turn: asyncio.Future[None] | None = None
        """Done when the message may be read. None means that it need not wait for that."""
        self.gave_way = False

    def end(self, now: float) -> None:
        """End the arrival now, with an error for its caller."""
        with suppress(RuntimeError):  # its time is up just now, so that it ends anyway
            self.timeout.reschedule(now)

    def refusal(self) -> ApiError:
        """Return the error for the caller after `end`."""
        if self.gave_way:
            return unavailable(Fault.OVERLOADED, "too many callers without a key send messages at once; try again")
        if self.turn is not None and not self.turn.done():
            return _too_many()
        message = "the message, or the next message of the stream, did not arrive in time; send it faster"
        return ApiError(Fault.DEADLINE_EXCEEDED, message)


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
        self._look_handle: asyncio.TimerHandle | None = None

    async def read(self, owner: str, receive: Callable[[], Awaitable[T]]) -> T:
        """Wait until a message of `owner`, a tenant's name or STRANGERS, may be read, receive and return it. Raises
        ApiError: DEADLINE_EXCEEDED; RATE_LIMIT_EXCEEDED, too many of the tenant's; OVERLOADED, a stranger's that gave
        way."""
        arrival = Arrival(owner)
        try:
            async with arrival.timeout:
                await self._begin(arrival)
                return await receive()
        except TimeoutError:
            raise arrival.refusal() from None
        finally:
            self._end(arrival)

    async def _begin(self, arrival: Arrival) -> None:
        owner = arrival.owner
        if self._look_handle is None:
            self._look_later()
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
            oldest.gave_way = True
            oldest.end(asyncio.get_running_loop().time())

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

    def _look_later(self) -> None:
        """Look for late arrivals in LOOK_SECONDS. A timer for each call would take 2 % of a small call's time."""
        self._look_handle = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        self._look_handle = None
        now = asyncio.get_running_loop().time()
        arrivals = list(chain(*self._reading.values(), *self._waiting.values()))
        for arrival in arrivals:
            if arrival.due <= now:
                arrival.end(now)
        if arrivals:
            self._look_later()


def _too_many() -> ApiError:
    message = f"{TENANT_MESSAGES} of your calls are sending their messages, and others wait; send fewer at once"
    return ApiError(Fault.RATE_LIMIT_EXCEEDED, message, retry_after=1.0, limit_kind="requests")
