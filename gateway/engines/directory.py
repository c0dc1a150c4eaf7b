"""The engines that join while gateways run, in Redis, where all gateway processes of a deployment find them.

A gateway process polls the directory and adds to its pools what is new. A directory that cannot be read changes
nothing: the engines that a gateway knows go on serving.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import structlog
from redis.asyncio import Redis

from engine.rpc.target import EngineTarget, EngineTls
from gateway.engines.pool import EnginePool
from gateway.redis.client import FAILURES

log = structlog.get_logger("engines")

POLL_SECONDS = 0.5
"""Seconds between two looks into the directory."""


class EngineDirectory:
    """The engines of one base model by name, as a Redis hash of name -> address."""

    def __init__(self, redis: Redis, model: str, prefix: str) -> None:
        """
        Args:
            model: name of the base model.
            prefix: the beginning of all keys of this deployment.
        """
        self._redis: Any = redis
        self._key = f"{prefix}engines:{model}"

    async def read(self) -> dict[str, str]:
        """Return the addresses of the engines by name. Raises a FAILURES exception if Redis does not answer."""
        found = await self._redis.hgetall(self._key)
        return {name.decode(): address.decode() for name, address in found.items()}

    async def replace(self, engines: Mapping[str, str]) -> None:
        """Write the addresses of the engines that there are now, and remove all others. Does nothing if the directory
        holds just these. Raises a FAILURES exception if Redis does not answer."""
        known = await self.read()
        gone = known.keys() - engines.keys()
        if known == engines:
            return
        async with self._redis.pipeline(transaction=True) as pipe:
            if engines:
                pipe.hset(self._key, mapping=dict(engines))
            if gone:
                pipe.hdel(self._key, *gone)
            await pipe.execute()


class DirectoryFollower:
    """Keeps the engines of a pool equal to those of a directory. Engines that were added to the pool otherwise stay."""

    def __init__(self, directory: EngineDirectory, pool: EnginePool, tls: EngineTls | None) -> None:
        """`tls` are the files for connections to engines on other machines; None means that there are none."""
        self._directory = directory
        self._pool = pool
        self._tls = tls
        self._added: dict[str, str] = {}
        """Addresses of the engines that were added from the directory, by name."""
        self._task: asyncio.Task[None] | None = None
        self._is_readable = True

    async def start(self) -> None:
        """Begin to follow the directory in a background task."""
        self._task = asyncio.create_task(self._follow(), name="engine-directory")

    async def close(self) -> None:
        """Stop following. The engines stay in the pool."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _follow(self) -> None:
        while True:
            try:
                await self._apply(await self._directory.read())
                self._is_readable = True
            except FAILURES as error:
                if self._is_readable:
                    log.warning("engine_directory_unreadable", reason=str(error))
                self._is_readable = False
            await asyncio.sleep(POLL_SECONDS)

    async def _apply(self, engines: Mapping[str, str]) -> None:
        """Remove from the pool the engines that are gone or have another address, and add those that are new."""
        for name, address in tuple(self._added.items()):
            if engines.get(name) != address:
                del self._added[name]
                with suppress(KeyError):  # it could not be added
                    await self._pool.remove(name)
                    log.info("engine_left", engine=name, address=address)
        for name, address in engines.items():
            if name not in self._added:
                await self._add(name, address)

    async def _add(self, name: str, address: str) -> None:
        self._added[name] = address
        try:
            await self._pool.add(name, EngineTarget(address, self._tls))
        except ValueError as error:
            log.error("engine_not_added", engine=name, address=address, reason=str(error))
        else:
            log.info("engine_joined", engine=name, address=address)
