"""Tasks of asyncio that an object starts, and ends with itself."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any


async def end_task(task: asyncio.Task[Any] | None) -> None:
    """Cancel a task, unless it is None, and wait until it has ended. Raises what the task raises."""
    if task is not None:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
