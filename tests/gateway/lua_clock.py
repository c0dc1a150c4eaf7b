"""A clock for scripts of Redis that stands still unless a test moves it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from redis.asyncio import Redis

from gateway.core.bucket import DAY
from gateway.redis.client import Script

KEY = "test:clock"
NOON = 20_000 * DAY + DAY // 2
"""Noon of a day of 2024, in microseconds since 1970."""


class LuaClock:
    """Sets the time that scripts loaded inside `lua_clock` are told, in microseconds since 1970."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self.now = NOON

    def __call__(self) -> int:
        return self.now

    async def move(self, microseconds: int = 0) -> None:
        self.now += microseconds
        await self._redis.hset(KEY, mapping={"s": self.now // 10**6, "us": self.now % 10**6})


@contextmanager
def lua_clock(redis: Redis) -> Iterator[LuaClock]:
    """Have scripts that are loaded in the block read a key where they would ask Redis for the time."""
    load = Script.load

    def timed(*names: str, package: str = "gateway.limiter") -> Script:
        text = load(*names, package=package).text
        return Script.of(text.replace("redis.call('TIME')", f"redis.call('HMGET', '{KEY}', 's', 'us')"))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Script, "load", timed)
        yield LuaClock(redis)
