"""Small shared files in which an engine process records how far its start is, that its step loop is alive, and which
requests it computes.

The process that started the engine reads the file: a step loop that has not written a beat within the time that it
announced has hung and cannot answer a call. When the engine process has ended, the file still names the requests of the
step under way, so that a request that makes engines crash can be found.

Both processes map the file into memory, so that a beat costs microseconds and no system call. A sequence number that is
odd during a write tells the reader to read again (a seqlock).
"""

from __future__ import annotations

import json
import mmap
import struct
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

HEADER = struct.Struct("<QddI")
"""Header of the file: sequence number, seconds on the system's monotonic clock, patience in seconds, bytes of text."""
FILE_BYTES = 1 << 18
"""Size of the file in bytes: room for some 5,000 request ids, where a step has hundreds."""
MAX_READS = 1000
"""Attempts to find an even sequence number. After them, the content is read as it is: the writer has died."""


class Beat(NamedTuple):
    """State of an engine's step loop, as read from its pulse file."""

    life: str
    """The id of the process."""
    at: float
    """When the loop last wrote a beat, in seconds on the system's monotonic clock."""
    patience: float
    """Seconds from `at` within which the loop should write the next beat."""
    request_ids: tuple[str, ...]
    """Requests in the step under way; empty while the engine is idle."""


class Loading(NamedTuple):
    """How far the start of an engine process has come, in its own words."""

    what: str
    done: int
    total: int


def write_loading(path: Path, loading: Loading) -> None:
    """Leave a message for `read_loading`."""
    path.write_text(json.dumps(loading))


def read_loading(path: Path) -> Loading | None:
    """Return the last message; None means that there is none yet, or that it is being written."""
    try:
        what, done, total = json.loads(path.read_text())
        return Loading(str(what), int(done), int(total))
    except (OSError, ValueError, TypeError):
        return None


class Pulse:
    """The writing end of the pulse file, used by the step loop alone."""

    def __init__(self, path: Path, life: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Create the file, which holds no beat yet."""
        path.write_bytes(bytes(FILE_BYTES))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), FILE_BYTES)
        self._life = life
        self._clock = clock
        self._number = 0

    def beat(self, patience: float, request_ids: Iterable[str] = ()) -> None:
        """Record that the loop is alive, computes these requests, and will beat again within `patience` seconds."""
        text = "\n".join((self._life, *request_ids)).encode()[: FILE_BYTES - HEADER.size]
        HEADER.pack_into(self._memory, 0, self._number + 1, self._clock(), patience, len(text))
        self._memory[HEADER.size : HEADER.size + len(text)] = text
        self._number += 2
        HEADER.pack_into(self._memory, 0, self._number, self._clock(), patience, len(text))


def read_beat(path: Path) -> Beat | None:
    """Return the last beat. None means that there is no file or no beat in it, because the step loop has not begun."""
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
