"""The last task of a batch: nothing of it is left but its record and its files."""

from __future__ import annotations

from gateway.batches.lease import Lease
from gateway.batches.store import BatchStore
from gateway.files.service import Files


async def sweep(store: BatchStore, files: Files, lease: Lease) -> None:
    """Does a task of the kind `sweep`; half of it done, it can be done again.

    Raises:
        ApiError: REGISTRY_UNAVAILABLE, STORAGE_UNAVAILABLE.
    """
    batch = lease.batch
    await files.storage.delete(await files.storage.list(batch.folder))
    await files.unpin(batch.tenant, batch.input_file_id, batch.id)
    await store.swept(lease)
