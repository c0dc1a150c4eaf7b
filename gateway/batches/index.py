"""A batch's index: where its lines lie in its input, in the order in which they are best run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from struct import Struct

from gateway.batches.lease import Lease
from gateway.files.storage import Storage

RECORD = Struct("<IQI")
"""Number, offset and length of a line."""


@dataclass(frozen=True, slots=True)
class IndexEntry:
    position: int
    line: int
    """Its number in the input, from 1."""
    offset: int
    """In bytes, as `length`, which is without the line's end."""
    length: int


def packed(lines: Iterable[tuple[int, int, int]]) -> bytes:
    """The whole index, of numbers, offsets and lengths in the order of positions."""
    return b"".join(RECORD.pack(*line) for line in lines)


async def read_index(storage: Storage, lease: Lease) -> list[IndexEntry]:
    """Of the positions of a lease that nobody has committed, in order.

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
