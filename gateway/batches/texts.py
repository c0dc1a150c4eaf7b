"""The lines of a shard as they stand in the input: small ones that lie together are read together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gateway.batches.index import IndexEntry
from gateway.files.record import FileRecord
from gateway.files.service import Files

SMALL_BYTES = 16 * 2**10
"""Lines up to here are kept from when the shard is begun, 2 MiB at most; others are read when they run."""
GAP_BYTES = 2**10
"""Between two lines, read for nothing."""
SPAN_BYTES = 256 * 2**10


class Texts:
    """Every method raises ApiError, as `Files` does."""

    def __init__(self, files: Files, source: FileRecord) -> None:
        self._files = files
        self._source = source
        self._kept: dict[int, bytes] = {}
        """By position."""

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
    """Small lines in runs of several that are worth one read."""
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
