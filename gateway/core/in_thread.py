"""Runs functions in threads for the event loop, and keeps nothing of them in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T], executor: Executor | None = None) -> T:
    """Run `work` in a thread of an executor (None: the loop's own), and return its result or raise its exception.

    Futures of executors end up in reference cycles: the results of `asyncio.to_thread` and the frames of its exceptions
    stay in memory until the next full garbage collection. So the outcome takes another way here.
    """
    outcome: list[tuple[Any, Exception | None]] = []

    def run() -> None:
        try:
            outcome.append((work(), None))
        except Exception as error:
            outcome.append((None, error))

    await asyncio.get_running_loop().run_in_executor(executor, partial(copy_context().run, run))
    result, error = outcome.pop()
    if error is None:
        return result  # type: ignore[no-any-return]
    try:
        raise error
    finally:
        del error  # its traceback refers to this frame
