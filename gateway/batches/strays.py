"""What lies in batches' folders and belongs to no batch that anything is left to do for."""

from __future__ import annotations

import structlog

from gateway.batches.record import FOLDERS
from gateway.batches.store import BatchStore
from gateway.files.storage import Storage
from gateway.files.sweeper import GRACE_SECONDS, Watch

log = structlog.get_logger("batches")


class StraySweeper:
    """Somebody slept through the end of a batch and then wrote what nobody wanted any more; or Redis lost its data."""

    def __init__(self, storage: Storage, store: BatchStore, strays: Watch | None = None) -> None:
        """`strays`: objects seen."""
        self._storage, self._store = storage, store
        self._strays = strays or Watch(GRACE_SECONDS)

    async def sweep(self) -> list[str]:
        """Names of the objects deleted. Raises ApiError: STORAGE_UNAVAILABLE, REGISTRY_UNAVAILABLE."""
        names = await self._storage.list(FOLDERS)  # first: a batch is in the index before anything is in its folder
        open_ids = await self._store.open_ids()
        doomed = self._strays.old(name for name in names if name.split("/")[1] not in open_ids)
        await self._storage.delete(doomed)
        if doomed:
            log.info("batch_strays_swept", objects=len(doomed))
        return doomed
