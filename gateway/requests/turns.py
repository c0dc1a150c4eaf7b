"""Tenants take turns, on the event loop and in the threads, so that a burst of one tenant's requests does not delay the
others.

An event loop runs everything that is ready before it looks for new input. A thousand requests of one tenant that arrive
together would all be read, refused or submitted in one iteration, and a request of another tenant needs several
iterations (to be read, and to get answers from Redis and from the engine). During a burst of 1,500 requests, the first
token of such a request came 0.9 s late on two cores.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakValueDictionary

from engine.core.fairness.accounts import RecentSenders
from gateway.core.in_thread import in_thread
from gateway.requests.wire_room import WireHold

T = TypeVar("T")

AT_ONCE = 4
"""Maximum number of requests of one tenant that begin in one iteration of the loop. Each takes some 0.5 ms."""
REFUSED_PAUSE_S = 0.005
"""Seconds between the starts of two requests of a tenant that was refused because it takes more than its share.
Refusing 1,500 requests at once kept a core from the engine for two seconds."""
REFUSED_FOR_S = 1.0
"""Seconds after a refusal during which the tenant's requests stay `REFUSED_PAUSE_S` apart."""


ENCODED_CHARACTERS = 20_000
"""Characters of a request's prompts that are encoded before other requests get a turn on the event loop."""
PROMPT_CHARACTERS = ENCODED_CHARACTERS // 16
"""Characters as which the fixed work on each prompt counts."""
ENCODED_AT_ONCE = 2
"""Maximum number of requests that only count, encode or decode tokens in work at the same time, because generations
need the threads, too."""
LOOP_BYTES = 32 * 1024
"""Maximum bytes of a body that is parsed on the event loop, which takes 3 ms at worst. To hand it to a thread takes
0.1 ms."""


class EncodingPauses:
    """Gives other requests a turn on the event loop while the many prompts of one request are encoded on it: 20,000
    characters take 20 to 40 ms, and a request may have 128 such prompts."""

    def __init__(self) -> None:
        self._since = 0
        """Characters encoded since the last pause."""

    async def after(self, num_characters: int) -> None:
        """Pause, if it is time, after a prompt of so many characters or token ids."""
        self._since += num_characters + PROMPT_CHARACTERS
        if self._since >= ENCODED_CHARACTERS:
            self._since = 0
            await asyncio.sleep(0)


@dataclass(slots=True)
class SlowedTenant:
    """State of a recently refused tenant: it is slowed `until` a time, and may next begin a request at `next_turn`,
    both in seconds on the loop's clock."""

    until: float
    next_turn: float


class LoopTurns:
    """Lets each tenant begin a few requests in each iteration of the event loop. Used from the loop's thread only."""

    def __init__(self) -> None:
        self._begun: Counter[str] = Counter()
        """Number of requests of each tenant that have begun in this iteration."""
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._slowed: dict[str, SlowedTenant] = {}
        self._recent = RecentSenders()
        self._tick_handle: asyncio.Handle | None = None
        self._ticks_soon = False

    async def take(self, tenant: str) -> None:
        """Wait until a request of this tenant may begin, and count the request. Returns at once if fewer than AT_ONCE
        of the tenant's requests have begun in this iteration, none waits, and none was refused recently."""
        self._recent.note(tenant, asyncio.get_running_loop().time())
        waits = tenant in self._waiting or tenant in self._slowed or self._begun[tenant] >= AT_ONCE
        self._tick_in(REFUSED_PAUSE_S if tenant in self._slowed else 0.0)
        if not waits:
            self._begun[tenant] += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        await turn

    def refused(self, tenant: str) -> None:
        """Slow down a tenant of which a request was refused because it takes more than its share: for `REFUSED_FOR_S`
        its requests begin `REFUSED_PAUSE_S` apart. Without effect if no other tenant has sent a request recently."""
        now = asyncio.get_running_loop().time()
        if self._recent.has_other(tenant, now):
            self._slowed[tenant] = SlowedTenant(now + REFUSED_FOR_S, now + REFUSED_PAUSE_S)
            self._tick_in(REFUSED_PAUSE_S)

    def _tick_in(self, seconds: float) -> None:
        """Schedule `_tick` in `seconds`, unless it is scheduled already and no later; 0 means in the next iteration of
        the loop."""
        if self._tick_handle is not None:
            if self._ticks_soon or seconds:
                return
            self._tick_handle.cancel()
        loop = asyncio.get_running_loop()
        self._ticks_soon = not seconds
        self._tick_handle = loop.call_later(seconds, self._tick) if seconds else loop.call_soon(self._tick)

    def _tick(self) -> None:
        """Let waiting requests begin: up to `AT_ONCE` of each tenant, but one in `REFUSED_PAUSE_S` of a tenant that was
        refused recently. Schedules the next tick while there may be more to do."""
        self._tick_handle = None
        self._begun.clear()
        now = asyncio.get_running_loop().time()
        self._slowed = {tenant: slowed for tenant, slowed in self._slowed.items() if now < slowed.until}
        for tenant, queue in list(self._waiting.items()):
            self._give(queue, tenant, now)
            if not queue:
                del self._waiting[tenant]
        if self._begun:
            self._tick_in(0.0)
        elif self._slowed:
            self._tick_in(REFUSED_PAUSE_S)

    def _give(self, queue: deque[asyncio.Future[None]], tenant: str, now: float) -> None:
        slowed = self._slowed.get(tenant)
        if slowed is not None:
            if now < slowed.next_turn:
                return
            slowed.next_turn = now + REFUSED_PAUSE_S
        while queue and self._begun[tenant] < (AT_ONCE if slowed is None else 1):
            turn = queue.popleft()
            if not turn.done():  # the request may have been cancelled
                turn.set_result(None)
                self._begun[tenant] += 1


class EncodingTurns:
    """Bounds the requests in work to a number, and to one of each tenant, so that another tenant's request waits for
    few of them, however many one tenant has sent. No limit of a tenant applies to requests that only count, encode or
    decode tokens, and one of 8 MiB takes seconds in a thread."""

    def __init__(self, at_once: int = ENCODED_AT_ONCE) -> None:
        """`at_once` is the maximum number of requests in work."""
        self._all = asyncio.Semaphore(at_once)
        self._own: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """Semaphore of each tenant that has such requests."""

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait until a request of the tenant may be worked on, which the block does."""
        if (own := self._own.get(tenant)) is None:
            own = self._own[tenant] = asyncio.Semaphore(1)
        async with own, self._all:
            yield

    @asynccontextmanager
    async def take(self, hold: WireHold) -> AsyncIterator[None]:
        """Wait until the request that has its body in `hold` may be worked on, which the block does. Raises ApiError
        (RATE_LIMIT_EXCEEDED) if by then its tenant leaves so many answers unread that there is no room for this one,
        which may be several times as long as the request."""
        async with self.turn(hold.tenant):
            hold.take(0)
            yield


class ParsingTurns:
    """Runs the parsers of request bodies: of short ones at once, of others in the process's one thread for this. There
    tenants take turns, because several threads would keep Python's lock from the event loop for longer."""

    def __init__(self) -> None:
        self._turns = EncodingTurns(at_once=1)
        self._thread = ThreadPoolExecutor(1, "parse")

    async def run(self, tenant: str, num_bytes: int, parse: Callable[[], T]) -> T:
        """Call `parse`, which parses a tenant's body of `num_bytes` bytes, and return its result. Raises what `parse`
        raises. The bytes of bodies that wait are counted where they arrive (`WireRoom`)."""
        if num_bytes <= LOOP_BYTES:
            return parse()
        async with self._turns.turn(tenant):
            return await in_thread(parse, self._thread)
