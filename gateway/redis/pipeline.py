"""A pipelined connection to Redis: calls are sent without waiting for earlier replies, which come back in order.

redis-py gives a connection to one call at a time and spends a quarter of a millisecond on each call; a call here costs
some tens of microseconds. redis-py still opens the connection and handles its address, TLS and password.
"""

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

TRIES = 2
"""Attempts for each call. The second one is for a connection that a restarted server has closed. The scripts are
idempotent, so that repeating one is harmless."""


@dataclass(slots=True)
class SentCall:
    """A call that was sent and is not answered yet."""

    reply: asyncio.Future[Any]
    since: int
    """Number of the tick in which the call was sent."""


class Pipeline:
    """A connection that the first call opens, and that the next call opens again after it broke. It is closed with the
    connection pool of `client`.

    A call that is not answered within `timeout` seconds times the current timeout factor fails, and the connection is
    closed too, because a connection can be dead without an error. The calls behind it are repeated on a new connection.
    One ticker watches all calls, which is cheaper than a timer for each call. Like `loop_timeout`, it tolerates stalls
    of this process.
    """

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

    async def call(self, *command: str | int | bytes) -> Any:
        """Send a command and return its reply. Raises RedisError or OSError (which includes TimeoutError)."""
        message: bytes = pack_command(command)  # type: ignore[arg-type]  # its stub means one argument
        for _ in range(TRIES - 1):
            try:
                return await self._exchange(message)
            except ConnectionError:
                continue
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
        """Fail the oldest call if it has waited too long, and close the connection. Returns whether any call waits."""
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
        """Return the open connection, or open one.

        If the connection broke, wait until the reader task has noticed and dropped it. Otherwise redis-py would reopen
        the connection under the reader, and both would wait for one answer forever.
        """
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
        """Read replies until the connection breaks, then fail the calls that wait and release the connection."""
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
    """Mark the reply's exception as retrieved. The call could not be sent and has raised already, so that its reply is
    not awaited."""
    if not reply.cancelled():
        reply.exception()


SLICES = 5
"""Number of slices in the usual timeout of one call."""


class Ticker:
    """Calls `tick` every `seconds` after `start`, while `tick` returns True. Ticks missed in a stall are skipped."""

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
    """Raise TimeoutError when the body has taken `timeout_factor` times `seconds`, except for event loop stalls."""
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
