"""Sets and removes the mark that a line or a task has in Redis while it is on trial (`gateway.batches.trial`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress

from gateway.batches.lease import Lease
from gateway.batches.store import BatchStore
from gateway.batches.trial import Suspicion
from gateway.core.errors import ApiError


@asynccontextmanager
async def under_mark(
    store: BatchStore,
    lease: Lease,
    position: int | None = None,
    *,
    stays: Callable[[BaseException], bool] = lambda error: False,
) -> AsyncIterator[Suspicion | None]:
    """Mark a line, or the lease's task, in Redis while the body runs, so that the mark stays if this process dies or
    `stays(exception)` is true. Yield what other processes have recorded of it, or None if the lease is lost.

    `position` is that of the line; None means the task itself. Raises ApiError on enter if Redis is away.
    """
    marking = asyncio.create_task(store.begin_trial(lease, position))
    try:
        suspicion = await asyncio.shield(marking)
    except asyncio.CancelledError:
        await asyncio.wait([marking])
        if marking.exception() is None and marking.result() is not None:
            await _apply_shielded(store.end_trial(lease, position))
        raise
    if suspicion is None:
        yield None
        return
    try:
        yield suspicion
    except BaseException as error:
        await _apply_shielded((store.keep_mark if stays(error) else store.end_trial)(lease, position))
        raise
    await _apply_shielded(store.end_trial(lease, position))


async def _apply_shielded(change: Coroutine[None, None, None]) -> None:
    with suppress(ApiError):  # Redis is away: the mark is removed when the lease is released
        await asyncio.shield(change)
