"""Small files, mapped into memory, through which an engine process shows its parent the progress of its start, beats of
its step loop, and the requests of the step under way, which outlive a crash."""

from __future__ import annotations

import json
import mmap
import struct
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

# A sequence number that is odd during a write tells the reader to read again (a seqlock).

HEADER = struct.Struct("<QddI")
"""Header of the file: sequence number, seconds on the system's monotonic clock, patience in seconds, bytes of text."""
FILE_BYTES = 1 << 18
"""Size of the file in bytes: enough for some 5,000 request ids, where a step has hundreds. More are cut off."""
MAX_READS = 1000
"""Attempts to find an even sequence number. Then the content is used as it is, because the writer has died."""


class Beat(NamedTuple):
    """Last sign of life of an engine's step loop: the id of the process's life (`EngineInfo.life`), the time on the
    monotonic clock, the seconds until the next beat is due (`patience`), and the requests in the step under way."""

    life: str
    """Unique id of the engine process (`EngineInfo.life`), not its pid."""
    at: float
    """When the loop last wrote a beat, in seconds on the system's monotonic clock."""
    patience: float
    """Seconds from `at` within which the loop should write the next beat."""
    request_ids: tuple[str, ...]
    """Requests in the step under way; empty while the engine is idle."""


class Loading(NamedTuple):
    """Progress of an engine process's start: the current part `what`, in words, is `done` of `total` units."""

    what: str
    done: int
    total: int


def write_loading(path: Path, loading: Loading) -> None:
    """Write the progress of this engine process's start to a file as JSON, for `read_loading` in its parent. Raises
    OSError if it cannot."""
    path.write_text(json.dumps(loading))


def read_loading(path: Path) -> Loading | None:
    """Return the progress of an engine process's start that it wrote last; None means that the file is missing or is
    being written."""
    try:
        what, done, total = json.loads(path.read_text())
        return Loading(str(what), int(done), int(total))
    except (OSError, ValueError, TypeError):
        return None


class Pulse:
    """Writes the pulse file of engine process `life`, by which its parent sees that the step loop is alive. Only the
    step loop uses it."""

    def __init__(self, path: Path, life: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Create or overwrite the pulse file at `path`, without a beat, and map it into memory."""
        path.write_bytes(bytes(FILE_BYTES))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), FILE_BYTES)
        self._life = life
        self._clock = clock
        self._number = 0

    def beat(self, patience: float, request_ids: Iterable[str] = ()) -> None:
        """Record that the step loop is alive, computes `request_ids`, and will beat again within `patience` seconds."""
        text = "\n".join((self._life, *request_ids)).encode()[: FILE_BYTES - HEADER.size]
        HEADER.pack_into(self._memory, 0, self._number + 1, self._clock(), patience, len(text))
        self._memory[HEADER.size : HEADER.size + len(text)] = text
        self._number += 2
        HEADER.pack_into(self._memory, 0, self._number, self._clock(), patience, len(text))


def read_beat(path: Path) -> Beat | None:
    """Return the last beat in a pulse file. None means that there is no file, or that the loop has not begun to
    beat."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), FILE_BYTES, prot=mmap.PROT_READ) as memory:
            return _read(memory)
    except (OSError, ValueError):  # there is no file, or it has not got its size yet
        return None


def _read(memory: mmap.mmap) -> Beat | None:
    for _ in range(MAX_READS):
        number, at, patience, size = HEADER.unpack_from(memory)
        text = memory[HEADER.size : HEADER.size + size]
        if number % 2 == 0 and HEADER.unpack_from(memory)[0] == number:
            break
    life, *request_ids = text.decode(errors="replace").split("\n")
    return Beat(life, at, patience, tuple(request_ids)) if number else None
