"""The index of a batch: where each line lies in the input file, in the order in which the lines run best."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from struct import Struct

from gateway.batches.lease import Lease
from gateway.files.storage import Storage

RECORD = Struct("<IQI")
"""Packed format of an entry: number, offset and length of a line."""


@dataclass(frozen=True, slots=True)
class IndexEntry:
    position: int
    line: int
    """Number of the line in the input, from 1."""
    offset: int
    """Offset of the line in the input, in bytes. `length` is in bytes too and excludes the line's newline."""
    length: int


def packed(lines: Iterable[tuple[int, int, int]]) -> bytes:
    """Pack a whole index from the numbers, offsets and lengths of lines in the order of positions."""
    return b"".join(RECORD.pack(*line) for line in lines)


async def read_index(storage: Storage, lease: Lease) -> list[IndexEntry]:
    """Read the index entries of a lease's positions that are not committed yet, in order.

    Raises:
        ApiError: STORAGE_UNAVAILABLE.
    """
    size = lease.last - lease.first
    if not size:
        return []
    name = lease.batch.index_name(lease.batch.index_fence)
    pieces = storage.read(name, lease.first * RECORD.size, size * RECORD.size)
    records = RECORD.iter_unpack(b"".join([piece async for piece in pieces]))
    entries = (IndexEntry(position, *record) for position, record in enumerate(records, lease.first))
    return [entry for entry in entries if not lease.is_done(entry.position)]
