"""The index of a batch, which says where each line lies in the input file, and the reader of a shard's lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from struct import Struct
from typing import TYPE_CHECKING

from gateway.batches.pauses import LoopPauses

if TYPE_CHECKING:  # the process that validates a batch writes an index only: importing Redis' client takes as long
    from gateway.batches.lease import Lease
    from gateway.files.record import FileRecord
    from gateway.files.service import Files
    from gateway.files.storage import Storage

SMALL_BYTES = 16 * 2**10
"""Maximum size in bytes of a line that is read when its shard begins (2 MiB for all lines of a shard). A longer line is
read when it runs."""
GAP_BYTES = 2**10
"""Maximum gap in bytes between two lines that are read in one call. The gap's bytes are read and dropped."""
SPAN_BYTES = 256 * 2**10


class LineReader:
    """Reads the lines of one shard from the input file `source`. Every method raises ApiError like `Files`."""

    def __init__(self, files: Files, source: FileRecord) -> None:
        self._files = files
        self._source = source
        self._kept: dict[int, bytes] = {}
        """Texts of the lines that were read ahead, by position."""

    async def read_ahead(self, entries: Iterable[IndexEntry]) -> None:
        for span in _spans(entries):
            start, end = span[0].offset, span[-1].offset + span[-1].length
            text = await self._read(start, end - start)
            for entry in span:
                self._kept[entry.position] = text[entry.offset - start : entry.offset - start + entry.length]

    async def get(self, entry: IndexEntry) -> bytes:
        kept = self._kept.get(entry.position)
        return await self._read(entry.offset, entry.length) if kept is None else kept

    async def _read(self, start: int, length: int) -> bytes:
        return b"".join([piece async for piece in self._files.content(self._source, start, length)])


def _spans(entries: Iterable[IndexEntry]) -> Iterator[list[IndexEntry]]:
    """Group the entries of small lines that lie at most GAP_BYTES apart into spans of at most SPAN_BYTES bytes, which
    are read in one call, in the order of their offsets. Long lines are left out."""
    span: list[IndexEntry] = []
    for entry in sorted((entry for entry in entries if entry.length <= SMALL_BYTES), key=lambda entry: entry.offset):
        end = entry.offset + entry.length
        far = span and entry.offset - span[-1].offset - span[-1].length > GAP_BYTES
        if span and (far or end - span[0].offset > SPAN_BYTES):
            yield span
            span = []
        span.append(entry)
    if span:
        yield span


RECORD = Struct("<IQI")
"""Packed format of an index entry: line number (4 bytes), offset (8) and length (4)."""


@dataclass(frozen=True, slots=True)
class IndexEntry:
    position: int
    line: int
    """Number of the line in the input file, from 1."""
    offset: int
    """Offset of the line in the input file, in bytes. `length` is in bytes too and excludes the line's newline."""
    length: int


def pack_index(lines: Iterable[tuple[int, int, int]]) -> bytes:
    """Return an index as bytes. `lines` has each line's number, offset and length, in the order of positions."""
    return b"".join(RECORD.pack(*line) for line in lines)


async def read_index(storage: Storage, lease: Lease) -> list[IndexEntry]:
    """Return the index entries of those positions of a lease that have no committed answer, in the order of positions.
    Raises ApiError: STORAGE_UNAVAILABLE."""
    size = lease.last - lease.first
    if not size:
        return []
    name = lease.batch.index_name(lease.batch.lines.index_fence)
    pieces = storage.read(name, lease.first * RECORD.size, size * RECORD.size)
    records = RECORD.iter_unpack(b"".join([piece async for piece in pieces]))
    entries, pauses = list[IndexEntry](), LoopPauses()
    for position, record in enumerate(records, lease.first):
        if not lease.is_done(position):
            entries.append(IndexEntry(position, *record))
        await pauses.pause_if_due()
    return entries
