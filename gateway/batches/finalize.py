"""The end of a batch: its committed answers as two files, and whoever never had one told why."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

import msgspec

from gateway.batches.answers import ENDINGS, ERRORS, NEVER_RUN, LineName, never_run
from gateway.batches.index import read_index
from gateway.batches.lease import Lease
from gateway.batches.lines import InputLine
from gateway.batches.record import result_file_id
from gateway.batches.store import BatchStore
from gateway.files.record import FileRecord
from gateway.files.service import Files

LINES_TOGETHER = 1024
"""Entries of the index in memory at once."""
KINDS = dict(zip(ENDINGS, ("output", "error"), strict=True))


async def finalize(lease: Lease, store: BatchStore, files: Files) -> None:
    """Writes both files and ends the batch. Whoever does it again, or at the same time, writes the very same.

    Raises:
        ApiError: storage or Redis is away; the batch is as it was.
    """
    parts = await store.parts(lease)
    ids = {ending: await _result(lease, files, ending, [part for part in parts if part.endswith(ending)]) for ending in ENDINGS}
    await store.finished(lease, *(ids[ending] for ending in ENDINGS))
