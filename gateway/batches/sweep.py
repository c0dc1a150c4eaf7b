"""The last task of a batch: delete everything but its record and its result files."""

from __future__ import annotations

from gateway.batches.lease import Lease
from gateway.batches.store import BatchStore
from gateway.files.service import Files


async def sweep(store: BatchStore, files: Files, lease: Lease) -> None:
    """Perform a `sweep` task. It can be repeated after it was interrupted.

    Raises:
        ApiError: REGISTRY_UNAVAILABLE, STORAGE_UNAVAILABLE.
    """
    batch = lease.batch
    await files.storage.delete(await files.storage.list(batch.folder))
    await files.unpin(batch.tenant, batch.input_file_id, batch.id)
    await store.swept(lease)
