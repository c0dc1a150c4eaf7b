"""Small shared files in which an engine process says how far its start is, that its step loop moves, and what it
computes.

The process that started the engine reads it: a loop that has not come round for longer than it said it would take has
hung, whatever the reason, and cannot be asked. When the process has ended, the file still names the requests that were
in the step under way, so that one of them that makes engines crash can be found.

The file is mapped into memory by both, so that a beat costs microseconds and no system call. A sequence number that is
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
"""Sequence number, seconds on the system's monotonic clock, patience in seconds, bytes of text."""
FILE_BYTES = 1 << 18
"""Room for some 5,000 request ids; a step has hundreds."""
MAX_READS = 1000
"""A reader that never finds an even sequence number reads what a process left that died while it wrote."""


class Beat(NamedTuple):
    """One look at an engine's step loop."""

    life: str
    """The id of the process."""
    at: float
    """When the loop last came round, in seconds on the system's monotonic clock."""
    patience: float
    """Seconds within which it should have come round again."""
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
        return Loading(*json.loads(path.read_text()))
    except (OSError, ValueError):
        return None


class Pulse:
    """The writing end, which belongs to the step loop."""

    def __init__(self, path: Path, life: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Creates the file. It says nothing before the first beat."""
        path.write_bytes(bytes(FILE_BYTES))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), FILE_BYTES)
        self._life = life
        self._clock = clock
        self._number = 0

    def beat(self, patience: float, request_ids: Iterable[str] = ()) -> None:
        """Say that the loop has come round, and will again within `patience` seconds."""
        text = "\n".join((self._life, *request_ids)).encode()[: FILE_BYTES - HEADER.size]
        HEADER.pack_into(self._memory, 0, self._number + 1, self._clock(), patience, len(text))
        self._memory[HEADER.size : HEADER.size + len(text)] = text
        self._number += 2
        HEADER.pack_into(self._memory, 0, self._number, self._clock(), patience, len(text))


def read_beat(path: Path) -> Beat | None:
    """Return the last beat; None means that the step loop has not begun."""
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
