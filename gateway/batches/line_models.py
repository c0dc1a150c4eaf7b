"""Which base model serves each line of a shard. It decides which engine's gate the line waits at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

import msgspec
from msgspec import Struct

from gateway.batches.line_reader import IndexEntry, LineReader
from gateway.requests.served_model import ServedModels


class _Body(Struct, frozen=True):
    model: str = ""


class _Line(Struct, frozen=True):
    """The part of a line of the input file that decides about its base model."""

    body: _Body = _Body()


class LineModels:
    """The base models of a shard's lines, and how many lines of each have not ended."""

    def __init__(self, models: ServedModels, named: str | None, positions: Iterable[int]) -> None:
        """
        Args:
            models: the base models of this gateway.
            named: the model that all lines of the batch name. None means that they name several.
            positions: positions of the lines that have not ended.
        """
        self._models = models
        self._by_position: dict[int, str] = {}
        self._left: Counter[str] = Counter()
        self._inside: Counter[str] = Counter()
        self._unread = set(positions)
        only = models.default if len(models) == 1 else models.serving(named) if named else None
        for position in sorted(self._unread) if only else ():
            self._note(position, only.name if only else "")

    async def read(self, reader: LineReader, entries: Iterable[IndexEntry]) -> None:
        """Read from the lines themselves which model each names, if that is not known yet. A line without a known model
        counts as one of the first model; it fails when it runs. Raises ApiError if the lines cannot be read."""
        for entry in entries:
            if entry.position in self._unread:
                self._note(entry.position, self._named_in(await reader.get(entry)))

    def of(self, position: int) -> str:
        """Return the name of the base model of a line whose model is known."""
        return self._by_position[position]

    @property
    def left(self) -> int:
        """Number of lines that have not ended."""
        return len(self._unread) + self._left.total()

    def waiting(self, model: str) -> int:
        """Number of lines that have not ended and are not in the engine, and that need a base model or may need it,
        because they have not been read."""
        return self._left[model] + len(self._unread) - self._inside[model]

    def needed(self) -> Collection[str]:
        """Return the base models of the lines that have not ended; all models if some lines have not been read."""
        if self._unread:
            return [model.name for model in self._models]
        return [model for model, count in self._left.items() if count]

    def enter(self, position: int) -> None:
        """Note that a line is in the engine, until `leave` is called."""
        self._inside[self.of(position)] += 1

    def leave(self, position: int) -> None:
        self._inside[self.of(position)] -= 1

    def end(self, position: int) -> None:
        """Note that a line has ended."""
        self._left[self.of(position)] -= 1

    def _note(self, position: int, model: str) -> None:
        self._unread.discard(position)
        self._by_position[position] = model
        self._left[model] += 1

    def _named_in(self, text: bytes) -> str:
        try:
            name = msgspec.json.decode(text, type=_Line).body.model
        except (msgspec.DecodeError, RecursionError):
            name = ""
        return (self._models.serving(name) or self._models.default).name
