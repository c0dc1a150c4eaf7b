"""Ends batches: writes the output file and the error file from the committed answers, then deletes everything else of
the batch. Also deletes objects of batches that no longer exist."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from heapq import merge
from typing import Literal

import msgspec
import structlog

from gateway.batches.answers import ERRORS, NEVER_RUN, OUTPUT, LineName, unrun_answer
from gateway.batches.input import BatchLine
from gateway.batches.lease import Lease
from gateway.batches.line_reader import IndexEntry, read_index
from gateway.batches.pauses import LoopPauses
from gateway.batches.record import FOLDERS, Batch, result_file_id
from gateway.batches.store import BatchStore
from gateway.files.service import Files
from gateway.files.storage import Storage
from gateway.files.sweeper import GRACE_SECONDS, NameAgeTracker

SORTED_AT_ONCE = 1000


async def finalize(store: BatchStore, files: Files, lease: Lease) -> None:
    """Perform a `finalize` task: write the output and error files, each if it would have lines, and end the batch
    unless the lease is lost. Unanswered lines get an error line. Repeating it, also concurrently, makes the same files.

    Raises ApiError if the storage or Redis is away; the batch has not ended then, but a result file may exist.
    """
    batch, parts = lease.batch, await store.parts(lease)
    entries = await read_index(files.storage, lease)
    output, errors = ([part for part in parts if part.endswith(ending)] for ending in (OUTPUT, ERRORS))
    output_id = error_id = None
    if output:
        size = await files.storage.total_size(output)
        output_id = await _adopted(files, batch, "output", concatenated(files.storage, output), size)
    if errors or entries:
        size = await files.storage.total_size(errors)
        error_id = await _adopted(files, batch, "error", _errors(lease, files, errors, entries), size)
    await store.finished(lease, output_id, error_id)


async def _adopted(
    files: Files, batch: Batch, kind: Literal["output", "error"], chunks: AsyncIterator[bytes], size: int
) -> str:
    """Store `chunks`, which have `size` bytes or more, as a result file of the tenant, charged beyond any quota, and
    return its id. Raises ApiError."""
    file_id, name = result_file_id(batch.id, kind), f"{batch.id}_{kind}.jsonl"
    await files.adopt(batch.tenant, file_id, name, chunks, batch.output_expires_after, expected=size)
    return file_id


async def concatenated(storage: Storage, names: Iterable[str]) -> AsyncIterator[bytes]:
    """Yield the contents of the objects `names`, in order, in pieces of at most 256 KiB. Raises ApiError."""
    for name in names:
        async for piece in storage.read(name):
            yield piece


async def _errors(
    lease: Lease, files: Files, parts: Iterable[str], entries: Sequence[IndexEntry]
) -> AsyncIterator[bytes]:
    async for piece in concatenated(files.storage, parts):
        yield piece
    if not entries:
        return
    outcome = lease.batch.outcome
    assert outcome is not None, "settled before a batch is finalized"
    source, start = await files.get(lease.tenant, lease.batch.input_file_id), min(entry.offset for entry in entries)
    pauses = LoopPauses()
    async for entry, text in _texts(files.content(source, start), start, await _by_offset(entries)):
        name = LineName(lease.batch_id, entry.line, msgspec.json.decode(text, type=BatchLine).custom_id)
        yield unrun_answer(name, *NEVER_RUN[outcome]).text
        await pauses.pause_if_due()


async def _by_offset(entries: Sequence[IndexEntry]) -> Iterator[IndexEntry]:
    """Return the entries in the order of their offsets. They are sorted in pieces, because sorting 50,000 at once would
    hold the event loop for 20 ms."""
    pieces, pauses = [], LoopPauses()
    for start in range(0, len(entries), SORTED_AT_ONCE):
        pieces.append(sorted(entries[start : start + SORTED_AT_ONCE], key=_offset))
        await pauses.pause_if_due()
    return merge(*pieces, key=_offset)


def _offset(entry: IndexEntry) -> int:
    return entry.offset


async def _texts(
    pieces: AsyncIterator[bytes], start: int, entries: Iterable[IndexEntry]
) -> AsyncIterator[tuple[IndexEntry, bytes]]:
    """Yield each entry with its line of the input. `pieces` are the input file's bytes from the offset `start` on, and
    are read once; `entries` are in the order of their offsets."""
    held = bytearray()
    for entry in entries:
        while start + len(held) < entry.offset + entry.length:
            held += await anext(pieces)
            passed = min(len(held), max(0, entry.offset - start))
            del held[:passed]
            start += passed
        first = entry.offset - start
        yield entry, bytes(held[first : first + entry.length])
        del held[: first + entry.length]
        start += first + entry.length


async def sweep(store: BatchStore, files: Files, lease: Lease) -> None:
    """Perform a `sweep` task: delete and refund an ended batch's objects, unpin its input file and delete its working
    keys and index entry. It can be repeated. Raises ApiError: REGISTRY_UNAVAILABLE, STORAGE_UNAVAILABLE."""
    batch = lease.batch
    await files.storage.delete(await files.storage.list(batch.folder))
    await files.refund_answers(batch.tenant, batch.id)
    await files.unpin(batch.tenant, batch.input_file_id, batch.id)
    await store.swept(lease)


log = structlog.get_logger("batches")


class StraySweeper:
    """Deletes objects of batches that are not in the index of open batches. They exist if a gateway stalled during the
    end of a batch and wrote objects afterwards, or if Redis lost its data."""

    def __init__(self, storage: Storage, store: BatchStore, strays: NameAgeTracker | None = None) -> None:
        """`strays` tracks how long stray objects have been seen; by default, the limit is GRACE_SECONDS."""
        self._storage, self._store = storage, store
        self._strays = strays or NameAgeTracker(GRACE_SECONDS)

    async def sweep(self) -> list[str]:
        """Delete objects that have been strays for long enough, and return their names. Raises ApiError:
        STORAGE_UNAVAILABLE, REGISTRY_UNAVAILABLE."""
        names = await self._storage.list(FOLDERS)  # first: a batch is in the index before anything is in its folder
        open_ids = await self._store.open_ids()
        strays = (name for name in names if name.split("/")[1] not in open_ids)
        doomed = await asyncio.to_thread(self._strays.names_older_than_limit, strays)  # there may be 100,000
        await self._storage.delete(doomed)
        if doomed:
            log.info("batch_strays_swept", objects=len(doomed))
        return doomed
