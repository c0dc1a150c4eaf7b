"""Sends a run's requests in an open loop: each at its arrival time, whether or not earlier ones have ended."""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress

from lab.bench.client import Client, Target
from lab.bench.plan import BenchRequest
from lab.bench.stream import Stream

LEAD_SECONDS = 0.1
"""Seconds from the start of a run to the zero of its arrival times, so that setup does not count as lateness."""


async def drive(
    target: Target,
    items: Sequence[BenchRequest],
    *,
    concurrency: int | None = None,
    timeout_s: float = 600.0,
    stop_after: str | None = None,
    on_end: Callable[[Stream], None] = lambda stream: None,
) -> list[Stream]:
    """Send `items`, in order of arrival, and return their outcomes, failures too, in that order, without garbage
    collection meanwhile. Raises OSError, ValueError or TlsFileError as `Client` does.

    Args:
        concurrency: maximum number of requests at once; latencies count from sending. None means no limit.
        timeout_s: seconds after which a request fails.
        stop_after: a lane; when its requests have ended, items that have not arrived are left out.
        on_end: called with every outcome.
    """
    gate = asyncio.Semaphore(concurrency) if concurrency else None
    left, stop = Counter(item.lane for item in items), asyncio.Event()

    async def send_item(item: BenchRequest) -> Stream:
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
                tasks.append(asyncio.create_task(send_item(item)))
            return list(await asyncio.gather(*tasks))


async def _until(due: float, stop: asyncio.Event) -> bool:
    """Sleep until a request is `due`, in seconds of `time.perf_counter`, or until `stop` ends the run. Return False if
    `stop` is set, so that the request is not sent."""
    delay = due - time.perf_counter()
    if delay > 0:
        with suppress(TimeoutError):
            async with asyncio.timeout(delay):
                await stop.wait()
    return not stop.is_set()


@contextmanager
def _without_collector() -> Iterator[None]:
    """Disable garbage collection in the block, after a full collection, and enable it at the end: a collection within
    the block would stall every stream while it traverses all prompts."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
