"""The mark that a line or a task has in Redis while it is on trial (`gateway.batches.trial`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from gateway.batches.lease import Lease
from gateway.batches.store import BatchStore
from gateway.core.errors import ApiError


@asynccontextmanager
async def marked(
    store: BatchStore, lease: Lease, position: int | None = None, *, stays: Callable[[BaseException], bool]
) -> AsyncIterator[bool]:
    """Mark a line, or the lease's task, before the block runs, and take the mark back when this process outlived it.

    Args:
        position: the line's place. None means the task itself.
        stays: tells whether the mark stays after an exception that the block raised.

    Yields:
        False if the lease is lost. Nothing is marked then.
    """
    marking = asyncio.create_task(store.begin_trial(lease, position))
    try:
        is_held = await asyncio.shield(marking)
    except asyncio.CancelledError:
        await asyncio.wait([marking])
        if marking.exception() is None and marking.result():
            await _take_back(store, lease, position)
        raise
    if not is_held:
        yield False
        return
    try:
        yield True
    except BaseException as error:
        if not stays(error):
            await _take_back(store, lease, position)
        raise
    await _take_back(store, lease, position)


async def _take_back(store: BatchStore, lease: Lease, position: int | None) -> None:
    with suppress(ApiError):  # then the mark stays, and there is one try less
        await asyncio.shield(store.end_trial(lease, position))
