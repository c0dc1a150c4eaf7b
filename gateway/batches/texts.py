"""Reads the lines of a shard from the input file. Small lines that lie close together are read together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gateway.batches.index import IndexEntry
from gateway.files.record import FileRecord
from gateway.files.service import Files

SMALL_BYTES = 16 * 2**10
"""Maximum length of lines that are read when the shard begins (2 MiB in total). Others are read when they run."""
GAP_BYTES = 2**10
"""Maximum gap between two lines that are read together. Its bytes are read and dropped."""
SPAN_BYTES = 256 * 2**10


class Texts:
    """The lines of one shard. Every method raises ApiError like `Files`."""

    def __init__(self, files: Files, source: FileRecord) -> None:
        self._files = files
        self._source = source
        self._kept: dict[int, bytes] = {}
        """Lines that were read ahead, by position."""

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
    """Group the small lines into spans that are worth one read each, in the order of their offsets."""
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
