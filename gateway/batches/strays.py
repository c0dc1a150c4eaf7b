"""Deletes objects in batches' folders that belong to no batch with work left."""

from __future__ import annotations

import structlog

from gateway.batches.record import FOLDERS
from gateway.batches.store import BatchStore
from gateway.files.storage import Storage
from gateway.files.sweeper import GRACE_SECONDS, Watch

log = structlog.get_logger("batches")


class StraySweeper:
    """Deletes stray objects. They exist if a gateway stalled during the end of a batch and wrote its objects
    afterwards, or if Redis lost its data."""

    def __init__(self, storage: Storage, store: BatchStore, strays: Watch | None = None) -> None:
        """`strays` tracks how long objects have been seen as strays."""
        self._storage, self._store = storage, store
        self._strays = strays or Watch(GRACE_SECONDS)

    async def sweep(self) -> list[str]:
        """Delete strays. Return their names. Raises ApiError: STORAGE_UNAVAILABLE, REGISTRY_UNAVAILABLE."""
        names = await self._storage.list(FOLDERS)  # first: a batch is in the index before anything is in its folder
        open_ids = await self._store.open_ids()
        doomed = self._strays.old(name for name in names if name.split("/")[1] not in open_ids)
        await self._storage.delete(doomed)
        if doomed:
            log.info("batch_strays_swept", objects=len(doomed))
        return doomed
