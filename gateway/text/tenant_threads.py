"""Runs long work on tenants' texts in threads, a few of each tenant at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakValueDictionary

from gateway.core.in_thread import in_thread

T = TypeVar("T")

TENANT_THREADS = 2
"""Maximum number of threads in which long texts of one tenant are encoded at the same time. Limits of requests apply
only once the tokens are known, and 8 MiB take seconds, so that one tenant could keep all threads from the others."""


class TenantThreads:
    """The threads of all tenants. Safe to share between tasks of one event loop."""

    def __init__(self) -> None:
        self._threads: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """Semaphore that bounds the threads of each tenant. It exists only while the tenant uses any of them."""

    async def run(self, tenant: str, work: Callable[[], T]) -> T:
        """Run `work` in one of the tenant's threads, and return its result."""
        if (threads := self._threads.get(tenant)) is None:
            threads = self._threads[tenant] = asyncio.Semaphore(TENANT_THREADS)
        await threads.acquire()
        running = asyncio.ensure_future(in_thread(work))
        running.add_done_callback(lambda _: threads.release())  # not sooner: a thread goes on if the caller leaves
        try:
            return await asyncio.shield(running)
        finally:
            del running  # it has the exception, whose traceback has this frame: the cycle would keep the chat in memory
