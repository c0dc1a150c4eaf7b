"""Checks a batch's input in a process of its own, so that nobody's tokens wait for it.

Standard input: one line of JSON (`Asked`), then nothing until whoever asked has ended. Standard output: one line of
JSON (`Found`), then the index.
"""

from __future__ import annotations

import os
import sys
import threading

import fsspec
import msgspec

from gateway.batches.input import Asked, InputCheck

NICENESS = 10


def main() -> None:
    """Raises whatever the storage does."""
    os.nice(NICENESS)
    asked = msgspec.json.decode(sys.stdin.buffer.readline(), type=Asked)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with fsspec.open(asked.url, "rb") as file:
        found, index = InputCheck(asked).run(file)
    sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n" + index)
    sys.stdout.buffer.flush()


def _end_with_parent() -> None:
    """Past Python's own reader, whose lock would be missed at the end of this process."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
