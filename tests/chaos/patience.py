"""Waiting for a condition."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

LOOK_SECONDS = 0.05


class Late(AssertionError):
    """A condition was not met in time."""


async def until(condition: Callable[[], Awaitable[object]], seconds: float, what: str) -> float:
    """Wait until a condition is met, and return the seconds that it took. Raises Late."""
    now = asyncio.get_running_loop().time
    began = now()
    while not await condition():
        if now() - began > seconds:
            raise Late(f"waited {seconds:g} s for {what}")
        await asyncio.sleep(LOOK_SECONDS)
    return now() - began
