"""Sends a run's requests, each at its time whatever became of the others (open loop)."""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress

from gateway.bench.client import Client, Target
from gateway.bench.plan import Item
from gateway.bench.stream import Stream

LEAD_SECONDS = 0.1
"""Between starting and the first request, so that preparing is not taken for lateness."""


async def drive(
    target: Target,
    items: Sequence[Item],
    *,
    concurrency: int | None = None,
    timeout_s: float = 600.0,
    stop_after: str | None = None,
    on_end: Callable[[Stream], None] = lambda stream: None,
) -> list[Stream]:
    """Sends `items`, in order of arrival, and returns what became of each in the order they were sent.

    Args:
        concurrency: at most this many at once: what is over waits, and its time counts from when it is sent. None:
            every request goes out at its time.
        stop_after: a lane; when all of its requests have ended, those of other lanes not sent yet are left out.
        on_end: told of every request as it ends.

    Raises:
        OSError: nobody answers at the target.
        ValueError: the URL is none.
    """
    gate = asyncio.Semaphore(concurrency) if concurrency else None
    left, stop = Counter(item.lane for item in items), asyncio.Event()

    async def one(item: Item) -> Stream:
        async with gate or nullcontext():
            stream = await client.send(item, began)
        on_end(stream)
        left[item.lane] -= 1
        if stop_after is not None and not left[stop_after]:
            stop.set()
        return stream

    async with Client(target, timeout_s) as client:
        began = time.perf_counter() + LEAD_SECONDS
        tasks = []
        with _without_collector():
            for item in items:
                if not await _until(began + item.at, stop):
                    break
                tasks.append(asyncio.create_task(one(item)))
            return list(await asyncio.gather(*tasks))


async def _until(due: float, stop: asyncio.Event) -> bool:
    """Sleeps until it is time. False: no longer wanted."""
    delay = due - time.perf_counter()
    if delay > 0:
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), delay)
    return not stop.is_set()


@contextmanager
def _without_collector() -> Iterator[None]:
    """A full collection stops every stream at once, for as long as it takes to look at all prompts."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
