"""Main program that checks a batch's input in its own process, so that the check delays no tokens and a crash ends only
this process.

Standard input: one line of JSON (`CheckParameters`), then nothing until the parent gateway has ended. Standard output:
one line of JSON (`CheckResult`), then the index. The exit status is STORAGE_STATUS if the storage could not be read.
The kernel ends the process with SIGXCPU if one line takes far longer than the whole file may.
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

from gateway.batches.cpu_budget import end_process_beyond
from gateway.batches.input import CheckParameters, InputCheck

NICENESS = 10
STORAGE_STATUS = 75
"""Exit status if the storage failed, so that a later attempt may succeed (EX_TEMPFAIL of sysexits.h)."""

T = TypeVar("T")


class StorageFailed(Exception):
    """The storage could not be read. `__cause__` is the exception of its library."""


class StoredFile:
    """The input file at an fsspec URL, open for reading. Methods raise StorageFailed for any exception of the
    library."""

    def __init__(self, url: str) -> None:
        self._file: BinaryIO = _asked_of_storage(lambda: fsspec.open(url, "rb").open())

    def read(self, size: int) -> bytes:
        return _asked_of_storage(lambda: self._file.read(size))


def main() -> None:
    os.nice(NICENESS)
    parameters = msgspec.json.decode(sys.stdin.buffer.readline(), type=CheckParameters)
    end_process_beyond(parameters.max_cpu_seconds)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        result, index = InputCheck(parameters).run(StoredFile(parameters.url))
    except StorageFailed:
        traceback.print_exc()
        sys.exit(STORAGE_STATUS)
    sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n" + index)
    sys.stdout.buffer.flush()


def _asked_of_storage(work: Callable[[], T]) -> T:
    """Return the result of `work`, a call of the storage's library. Raises StorageFailed in place of any exception."""
    try:
        return work()
    except Exception as error:  # storage libraries raise what they like
        raise StorageFailed(str(error)) from error


def _end_with_parent() -> None:
    """Wait until the parent gateway closes standard input, as its death does, then end this process with status 1.
    Reads the file descriptor, because a thread that waits in sys.stdin holds its lock and hangs the exit."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
