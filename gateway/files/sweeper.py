"""Deletes expired files and objects without an owner. Every gateway sweeps; concurrent sweeps do no harm."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager

import structlog

from gateway.core.errors import ApiError
from gateway.files.record import OBJECTS, object_of
from gateway.files.registry import AT_ONCE, FileRegistry
from gateway.files.storage import PARTIAL, Storage

log = structlog.get_logger("files")

INTERVAL_SECONDS = 600.0
GRACE_SECONDS = 3600.0
"""Seconds for which an object must have been without an owner before it is deleted: Redis may have started without its
data, and an operator may notice in time."""
PARTIAL_SECONDS = 86_400.0
"""Age in seconds at which an incomplete object is deleted. No upload takes longer."""


class NameAgeTracker:
    """Measures how long names have been seen without a gap, on a monotonic clock. A new process begins anew."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._since: dict[str, float] = {}

    def names_older_than_limit(self, names: Iterable[str]) -> list[str]:
        """Record the current names. Return those that have been among the names for at least the configured seconds."""
        now = self._clock()
        self._since = {name: self._since.get(name, now) for name in names}
        return [name for name, since in self._since.items() if now - since >= self._seconds]


class Sweeper:
    """Sweeps files for one gateway."""

    def __init__(
        self,
        storage: Storage,
        registry: FileRegistry,
        strays: NameAgeTracker | None = None,
        partials: NameAgeTracker | None = None,
    ) -> None:
        """`strays` watches objects without an owner, `partials` watches incomplete objects."""
        self._storage, self._registry = storage, registry
        self._strays = strays or NameAgeTracker(GRACE_SECONDS)
        self._partials = partials or NameAgeTracker(PARTIAL_SECONDS)

    async def sweep(self) -> list[str]:
        """Delete objects. Return their names. Raises ApiError: STORAGE_UNAVAILABLE, REGISTRY_UNAVAILABLE."""
        expired: set[str] = set()
        strays: set[str] = set()
        for tenant, tokens in _by_tenant(await self._storage.list(OBJECTS)).items():
            for some in _slices(tokens):
                gone, known = await self._registry.sweep(tenant, some)
                expired |= {record.object_name for record in gone}
                strays |= {object_of(tenant, token) for token in some if token not in known}
        partials = self._partials.names_older_than_limit(await self._storage.list(PARTIAL))
        doomed = sorted({*expired, *self._strays.names_older_than_limit(strays - expired), *partials})
        await self._storage.delete(doomed)
        if doomed:
            log.info("files_swept", objects=len(doomed), expired=len(expired), partials=len(partials))
        return doomed


@asynccontextmanager
async def sweeping(sweep: Callable[[], Awaitable[object]]) -> AsyncGenerator[None, None]:
    """Call `sweep` periodically in the background while the context is entered."""
    task = asyncio.create_task(_keep_sweeping(sweep), name="sweeper")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _keep_sweeping(sweep: Callable[[], Awaitable[object]]) -> None:
    """Call `sweep` periodically until cancelled. A failure is retried in the next round."""
    while True:
        await asyncio.sleep(INTERVAL_SECONDS)
        try:
            await sweep()
        except ApiError as error:
            log.warning("sweep_failed", reason=error.message)


def _by_tenant(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the tokens of objects by tenant."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in names:
        tenant, _, token = name.removeprefix(OBJECTS).partition("/")
        found[tenant].append(token)
    return found


def _slices(tokens: Sequence[str]) -> Iterable[Sequence[str]]:
    return (tokens[start : start + AT_ONCE] for start in range(0, len(tokens), AT_ONCE))
