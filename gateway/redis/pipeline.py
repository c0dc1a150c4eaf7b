"""A pipelined connection to Redis: calls do not wait for earlier replies, which come in order. A call takes some tens
of microseconds instead of redis-py's 250; redis-py still opens the connection."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from hiredis import pack_command
from redis.asyncio import Redis
from redis.exceptions import ConnectionError, RedisError, ResponseError

from gateway.redis.states import answer_of

TRIES = 2
"""Maximum attempts for each call. The second attempt is for a connection that a restarted server has closed, or that
leads to one that a failover has demoted. Calls must therefore be idempotent, as the gateway's scripts are."""


@dataclass(slots=True)
class Attempts:
    """Notes whether a call was sent more than once."""

    repeated: bool = False
    """True if it was or may have been, so that a reply may be that of a repetition. False if Redis refused the first,
    because of its state, and so did nothing."""


@dataclass(slots=True)
class SentCall:
    """A call that was sent to Redis and whose reply has not arrived yet. Replies arrive in the order of sending."""

    reply: asyncio.Future[Any]
    since: int
    """Number of the `Pipeline` ticker's tick in which the call was sent. A tick lasts 1/SLICES of the usual timeout."""


class Pipeline:
    """One connection from the pool of `client`, shared by all calls, reopened after failures. A call without answer
    within `timeout` times `timeout_factor()` seconds raises TimeoutError and closes it; later calls are repeated."""

    # One ticker watches all calls, which is cheaper than a timer for each. Time during which the event loop stalls
    # hardly counts, as in `loop_timeout`.
    def __init__(self, client: Redis, timeout: float, timeout_factor: Callable[[], int] = lambda: 1) -> None:
        self._pool = client.connection_pool
        self._timeout = timeout
        self._timeout_factor = timeout_factor
        self._connection: Any = None
        self._opening = asyncio.Lock()
        self._waiting: deque[SentCall] = deque()
        self._reading: asyncio.Task[None] | None = None
        self._ticks = 0
        self._ticker = Ticker(timeout / SLICES, self._tick)

    async def call(self, *command: str | int | bytes, attempts: Attempts | None = None) -> Any:
        """Send a command and return its reply. Sends it once more if the connection breaks, and notes that in
        `attempts`. Raises RedisError, also for an error reply, or OSError (which includes TimeoutError)."""
        attempts = attempts or Attempts()
        message: bytes = pack_command(command)  # type: ignore[arg-type]  # its stub means one argument
        for _ in range(TRIES - 1):
            try:
                return await self._exchange(message)
            except ConnectionError as error:
                # A server whose state made it refuse a call has refused those that were sent after it, too.
                attempts.repeated = attempts.repeated or not answer_of(error)
        return await self._exchange(message)

    async def _exchange(self, message: bytes) -> Any:
        connection = await self._connected()
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append(SentCall(reply, self._ticks))
        self._ticker.start()
        try:
            await connection.send_packed_command(message, check_health=False)
        except BaseException:
            reply.add_done_callback(_unheard)
            raise
        return await reply

    def _tick(self) -> bool:
        """Advance the tick count. If the oldest waiting call has used up its time, fail it with TimeoutError and cancel
        the reader task, which closes the connection. Return whether any call was waiting: if not, the ticker stops."""
        self._ticks += 1
        if not self._waiting:
            return False
        first = self._waiting[0]
        if self._ticks - first.since > SLICES * self._timeout_factor():
            if not first.reply.done():
                first.reply.set_exception(TimeoutError("no answer in time"))
            self._hang_up()
        return True

    def _hang_up(self) -> None:
        if self._reading is not None:
            self._reading.cancel()

    async def _connected(self) -> Any:
        """Return the open connection, or open one. Raises TimeoutError or the exceptions of redis-py."""
        # Wait until the reader has dropped a broken connection: redis-py would reopen it under the reader, and both
        # would wait for one answer forever.
        if self._connection is not None and self._reading is not None and not self._connection.is_connected:
            async with loop_timeout(self._timeout, self._timeout_factor()):
                await asyncio.wait((self._reading,))
        return self._connection or await self._open()

    async def _open(self) -> Any:
        async with loop_timeout(self._timeout, self._timeout_factor()), self._opening:
            if self._connection is None:
                connection = await self._pool.get_connection()
                connection.socket_timeout = None  # it would make a task of every write; calls have their own timeout
                self._connection = connection
                self._reading = asyncio.create_task(self._read(connection), name="redis-pipeline")
        return self._connection

    async def _read(self, connection: Any) -> None:
        """Resolve the waiting calls with the replies, in order, until the connection breaks or the task is cancelled.
        Then fail all calls that still wait and return the connection, closed, to the pool."""
        failure: Exception = ConnectionError("the server was given up on")
        try:
            while True:
                self._answer(await self._next(connection))
        except (RedisError, OSError) as error:
            failure = error
        finally:
            self._connection = None
            broken, self._waiting = self._waiting, deque()
            for call in broken:
                if not call.reply.done():
                    call.reply.set_exception(failure)
            del failure  # its traceback refers to this frame: a cycle would keep what the frame holds
            await connection.disconnect(nowait=True)
            await self._pool.release(connection)

    async def _next(self, connection: Any) -> Any:
        try:
            return await connection.read_response(timeout=math.inf)
        except ResponseError as error:
            return error

    def _answer(self, value: Any) -> None:
        reply = self._waiting.popleft().reply
        if reply.done():
            return
        if isinstance(value, Exception):
            reply.set_exception(value)
        else:
            reply.set_result(value)


def _unheard(reply: asyncio.Future[Any]) -> None:
    """Mark the exception of `reply` as retrieved, so that asyncio does not log it. The call could not be sent and has
    already raised, so no code awaits `reply`."""
    if not reply.cancelled():
        reply.exception()


SLICES = 5
"""Number of ticks into which the usual timeout of one call is divided."""


class Ticker:
    """Repeating timer on the event loop: `start` begins to call `tick` every `seconds`, until `tick` returns False or
    `stop` is called. Ticks missed in a stall of the loop are skipped. `start` does nothing while the timer runs."""

    def __init__(self, seconds: float, tick: Callable[[], bool]) -> None:
        self._seconds = seconds
        self._tick = tick
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        if self._handle is None:
            self._handle = asyncio.get_running_loop().call_later(self._seconds, self._ring)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _ring(self) -> None:
        self._handle = None
        if self._tick():
            self.start()


@asynccontextmanager
async def loop_timeout(seconds: float, timeout_factor: int) -> AsyncGenerator[None, None]:
    """Raise TimeoutError in the body once it has taken `timeout_factor` times `seconds`. Time is counted in ticks of
    the event loop, so a stall of the loop counts as one tick (1/SLICES of `seconds`) at most."""
    left = SLICES * timeout_factor

    def tick() -> bool:
        nonlocal left
        left -= 1
        if left == 0:
            timeout.reschedule(asyncio.get_running_loop().time())
        return left > 0

    ticker = Ticker(seconds / SLICES, tick)
    async with asyncio.timeout(None) as timeout:
        ticker.start()
        try:
            yield
        finally:
            ticker.stop()
