"""Many small calls to Redis in few writes: while one batch is on its way, the next gathers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

Command = tuple[str | int | bytes, ...]


class Batches:
    """One batch at a time, over one connection of the pool: at rest a call goes out at once, under load the price of a
    write and a read is shared."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._waiting: list[tuple[Command, asyncio.Future[Any]]] = []
        self._sender: asyncio.Task[None] | None = None

    async def call(self, *command: str | int | bytes) -> Any:
        """The reply to one command. Raises RedisError, OSError. A caller who leaves before it is sent has not asked."""
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((command, reply))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send(), name="redis-batches")
        return await reply

    async def _send(self) -> None:
        while self._waiting:
            batch = [(command, reply) for command, reply in self._waiting if not reply.done()]
            self._waiting = []
            replies = await self._ask([command for command, _ in batch])
            for (_, reply), value in zip(batch, replies, strict=True):
                if reply.done():
                    continue
                if isinstance(value, Exception):
                    reply.set_exception(value)
                else:
                    reply.set_result(value)

    async def _ask(self, commands: Sequence[Command]) -> Sequence[Any]:
        """A reply or an error for each."""
        if not commands:
            return ()
        try:
            async with self._client.pipeline(transaction=False) as pipe:
                for command in commands:
                    pipe.execute_command(*command)
                return await pipe.execute(raise_on_error=False)
        except (RedisError, OSError) as error:
            return [error] * len(commands)
