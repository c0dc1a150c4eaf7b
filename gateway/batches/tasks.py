"""Tasks of a batch that run no lines: validate its input, write its files, delete what it leaves, or give it up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext

import structlog

from gateway.batches.lease import Lease
from gateway.batches.marks import under_mark
from gateway.batches.quarantine import Quarantine
from gateway.batches.record import BatchError
from gateway.batches.store import BatchStore
from gateway.batches.trial import LOST_CODE, MOST_MARKS
from gateway.core.errors import ApiError
from gateway.files.service import Files

log = structlog.get_logger("batches")


class ControlTask:
    """`LeasedWork` on a task without lines, which is completed as a whole or released unchanged. Its creation starts
    it.

    A task whose last holder never released it is suspect, because its process may have died of it. It is tried while
    this process does no other work on batches, with a mark in Redis, and it is given up when it has `MOST_MARKS` marks.

    A validation runs in a process of its own and may take a minute. No other work waits for it, but for other suspects
    if it is suspect itself.
    """

    def __init__(
        self,
        lease: Lease,
        store: BatchStore,
        files: Files,
        quarantine: Quarantine,
        work: Callable[[], Awaitable[None]],
    ) -> None:
        """`work` performs the task. It raises ApiError if a later attempt may succeed; other exceptions count against
        it."""
        self.lease = lease
        self._store = store
        self._files = files
        self._quarantine = quarantine
        self._work = work
        self._task = asyncio.create_task(self._do(), name=f"batch-{lease.task_name}")
        self.is_lost = False

    async def run(self) -> None:
        """Wait for the end of the task, and raise the exceptions of `work`. If `end`, `drain` or `stop` ended it,
        give its lease back to the store, so that another gateway may claim it; a lost lease is not given back."""
        try:
            await asyncio.wait([self._task])
        except asyncio.CancelledError:
            self._task.cancel()
            await asyncio.wait([self._task])
            raise
        if not self._task.cancelled():
            self._task.result()
        elif not self.is_lost:
            await self._store.release(self.lease)

    def on_lease_lost(self) -> None:
        self.is_lost = True
        self._task.cancel()

    def end(self) -> None:
        self._task.cancel()

    def drain(self) -> None:
        """Stop the task, which `run` then releases, so that another gateway may perform it at once."""
        self.end()

    def stop(self) -> None:
        self.end()

    async def _do(self) -> None:
        lease, is_long = self.lease, self.lease.task == "validate"
        if not lease.losses:
            async with nullcontext() if is_long else self._quarantine.together():
                await self._work()
        else:
            log.warning("batch_task_on_trial", batch=lease.batch_id, task=lease.task_name, losses=lease.losses)
            async with self._quarantine.apart() if is_long else self._quarantine.alone():
                await self._try()

    async def _try(self) -> None:
        """Perform a suspect task under a mark, give it up if it has MOST_MARKS marks, or stop if the lease is lost. The
        mark remains if the process dies or `work` raises anything but ApiError or a cancellation."""
        async with under_mark(self._store, self.lease, stays=_is_blamed) as suspicion:
            if suspicion is None:
                self.on_lease_lost()
            elif suspicion.marks >= MOST_MARKS:
                await give_up(self._store, self._files, self.lease)
            else:
                await self._work()


def _is_blamed(error: BaseException) -> bool:
    """Return whether an exception counts against the task. A cancellation or an ApiError, which may pass, does not."""
    return not isinstance(error, ApiError | asyncio.CancelledError)


async def give_up(store: BatchStore, files: Files, lease: Lease) -> None:
    """End a batch whose task will not be tried again, and log that.

    A batch that could not be validated or finalized ends as failed (if cancelled, see `BatchStore.invalid`). One that
    could not be swept has already ended: its input is unpinned, and `StraySweeper` deletes its objects an hour later.
    Raises ApiError if Redis is away.
    """
    log.error("batch_task_given_up", batch=lease.batch_id, task=lease.task_name, marks=MOST_MARKS)
    if lease.task == "sweep":
        await files.refund_answers(lease.tenant, lease.batch_id)
        await files.unpin(lease.tenant, lease.batch.input_file_id, lease.batch_id)
        await store.swept(lease)
        return
    doing = "checked the input file" if lease.task == "validate" else "put the answers together"
    message = (
        f"the process that {doing} ended unexpectedly {MOST_MARKS} times while its gateway did no other work on "
        "batches, so the batch is given up"
    )
    await store.invalid(lease, [BatchError(LOST_CODE, message)])
