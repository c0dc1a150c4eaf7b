"""Deletes expired files, and objects that belong to no file. Every gateway sweeps; concurrent sweeps do no harm."""

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
"""Seconds for which an object must have been seen to belong to no file before it is deleted: Redis may have started
without its data, and an operator may notice in time."""
PARTIAL_SECONDS = 86_400.0
"""Seconds for which an incomplete object must have been seen before it is deleted. No upload takes longer."""


class NameAgeTracker:
    """Measures, in memory, for how long each object's name has been in every call of `names_older_than_limit`, so that
    a sweeper deletes only objects that have long been strays. The limit is `seconds`."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._since: dict[str, float] = {}

    def names_older_than_limit(self, names: Iterable[str]) -> list[str]:
        """Record the names that exist now and forget all others. Return the names that first came at least the limit
        ago and were in all calls since."""
        now = self._clock()
        self._since = {name: self._since.get(name, now) for name in names}
        return [name for name, since in self._since.items() if now - since >= self._seconds]


class Sweeper:
    """Deletes the objects of expired files, stray objects and old incomplete objects, in one gateway process."""

    def __init__(
        self,
        storage: Storage,
        registry: FileRegistry,
        strays: NameAgeTracker | None = None,
        partials: NameAgeTracker | None = None,
    ) -> None:
        """`strays` tracks objects that belong to no file or upload (None: for GRACE_SECONDS), `partials` tracks
        incomplete ones (None: for PARTIAL_SECONDS)."""
        self._storage, self._registry = storage, registry
        self._strays = strays or NameAgeTracker(GRACE_SECONDS)
        self._partials = partials or NameAgeTracker(PARTIAL_SECONDS)

    async def sweep(self) -> list[str]:
        """Remove expired files with their objects, refund expired uploads, and delete old stray and incomplete objects.
        Return the names of the deleted objects. Raises ApiError: STORAGE_UNAVAILABLE, REGISTRY_UNAVAILABLE."""
        expired: set[str] = set()
        strays: set[str] = set()
        names = await self._storage.list(OBJECTS)
        for tenant, tokens in (await asyncio.to_thread(_by_tenant, names)).items():  # there may be 100,000
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
    """Call `sweep` every INTERVAL_SECONDS in a background task, which is cancelled on exit. Errors are logged."""
    task = asyncio.create_task(_keep_sweeping(sweep), name="sweeper")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _keep_sweeping(sweep: Callable[[], Awaitable[object]]) -> None:
    """Wait INTERVAL_SECONDS and call `sweep`, forever. Log an error and go on."""
    while True:
        await asyncio.sleep(INTERVAL_SECONDS)
        try:
            await sweep()
        except ApiError as error:
            log.warning("sweep_failed", reason=error.message)
        except Exception:  # a bug must not end the sweeps, without which storage fills up
            log.exception("sweep_failed")


def _by_tenant(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the upload tokens in the names of files' objects, grouped by tenant."""
    tokens: dict[str, list[str]] = defaultdict(list)
    for name in names:
        tenant, _, token = name.removeprefix(OBJECTS).partition("/")
        tokens[tenant].append(token)
    return tokens


def _slices(tokens: Sequence[str]) -> Iterable[Sequence[str]]:
    return (tokens[start : start + AT_ONCE] for start in range(0, len(tokens), AT_ONCE))
