"""Ends a batch one of whose tasks repeatedly killed its gateway process."""

from __future__ import annotations

import structlog

from gateway.batches.lease import Lease
from gateway.batches.record import BatchError
from gateway.batches.store import BatchStore
from gateway.batches.trial import LOST_CODE, MOST_MARKS
from gateway.files.service import Files

log = structlog.get_logger("batches")


async def give_up(store: BatchStore, files: Files, lease: Lease) -> None:
    """End a batch whose task will not be tried again.

    A batch that could not be validated or finalized ends as failed. One that could not be swept has already ended: its
    objects are left to `gateway.batches.strays`, which removes them an hour later.

    Raises:
        ApiError: Redis is away; the batch is unchanged.
    """
    log.error("batch_task_given_up", batch=lease.batch_id, task=lease.member, marks=MOST_MARKS)
    if lease.task == "sweep":
        await files.unpin(lease.tenant, lease.batch.input_file_id, lease.batch_id)
        await store.swept(lease)
        return
    doing = "checked the input file" if lease.task == "validate" else "put the answers together"
    message = (
        f"the process that {doing} ended unexpectedly {MOST_MARKS} times while its gateway did no other work on "
        "batches, so the batch is given up"
    )
    await store.invalid(lease, [BatchError(LOST_CODE, message)])
