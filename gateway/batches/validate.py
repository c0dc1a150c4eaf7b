"""Checks a batch's input in a process of its own, so that no tokens wait for it and it may die of the input.

Standard input: one line of JSON (`Asked`), then nothing until the gateway that asked has ended. Standard output: one
line of JSON (`Found`), then the index. The exit status is STORAGE_STATUS if the storage could not be read.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import BinaryIO, TypeVar

import fsspec
import msgspec

from gateway.batches.input import Asked, InputCheck

NICENESS = 10
STORAGE_STATUS = 75
"""Exit status that says: the storage failed, and the same may succeed later (EX_TEMPFAIL of sysexits.h)."""

T = TypeVar("T")


class StorageFailed(Exception):
    """The storage could not be read; the cause is what its library raised."""


class StoredFile:
    """The input as the check reads it, which raises StorageFailed for whatever the storage's library raises."""

    def __init__(self, url: str) -> None:
        self._file: BinaryIO = _asked_of_storage(lambda: fsspec.open(url, "rb").open())

    def read(self, size: int) -> bytes:
        return _asked_of_storage(lambda: self._file.read(size))


def main() -> None:
    os.nice(NICENESS)
    asked = msgspec.json.decode(sys.stdin.buffer.readline(), type=Asked)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        found, index = InputCheck(asked).run(StoredFile(asked.url))
    except StorageFailed:
        traceback.print_exc()
        sys.exit(STORAGE_STATUS)
    sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n" + index)
    sys.stdout.buffer.flush()


def _asked_of_storage(work: Callable[[], T]) -> T:
    """Raises StorageFailed."""
    try:
        return work()
    except Exception as error:  # storage libraries raise what they like
        raise StorageFailed(str(error)) from error


def _end_with_parent() -> None:
    """Past Python's own reader, whose lock would be missed at the end of this process."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
