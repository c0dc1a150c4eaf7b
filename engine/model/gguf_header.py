"""Reads the header of a GGUF file to find out how large its tensors are, without reading the rest of the file."""

from __future__ import annotations

import os
import struct
from math import prod
from pathlib import Path
from typing import BinaryIO

MAGIC = b"GGUF"
VERSIONS = (2, 3)
BEGINNINGS = [MAGIC + struct.pack("<I", version) for version in VERSIONS]
FIXED_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Size in bytes of a metadata value by its type, for integers, floats and booleans."""
STRING, ARRAY = 8, 9
MOST_DIMENSIONS = 4


def num_weights(gguf: Path) -> int:
    """Return the number of elements of all tensors of a GGUF file together. Raises ValueError if the file is no GGUF
    file of version 2 or 3, or is damaged."""
    with gguf.open("rb") as file:
        if file.read(len(MAGIC) + 4) not in BEGINNINGS:
            raise ValueError(f"{gguf} is no GGUF file of version {' or '.join(map(str, VERSIONS))}")
        try:
            return _Header(file).num_weights()
        except (EOFError, KeyError) as error:
            raise ValueError(f"{gguf} is a damaged GGUF file") from error


class _Header:
    """Reads a header from an open file, from behind its version. Raises EOFError or KeyError if the file is damaged."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._size = os.fstat(file.fileno()).st_size

    def bytes(self, size: int) -> bytes:
        found = self._file.read(min(size, self._size))
        if len(found) < size:
            raise EOFError
        return found

    def number(self, kind: str) -> int:
        """Read a little-endian unsigned integer. `kind` is I for 32 bits, Q for 64 bits."""
        return int(struct.unpack(f"<{kind}", self.bytes(struct.calcsize(f"<{kind}")))[0])

    def num_weights(self) -> int:
        num_tensors, num_values = self.number("Q"), self.number("Q")
        for _ in range(num_values):
            self._skip_string()
            self._skip_value(self.number("I"))
        return sum(self._tensor() for _ in range(num_tensors))

    def _tensor(self) -> int:
        """Read the description of a tensor (name, dimensions, type, offset) and return its number of elements."""
        self._skip_string()
        count = self.number("I")
        if count > MOST_DIMENSIONS:
            raise EOFError
        shape = [self.number("Q") for _ in range(count)]
        self._skip(4 + 8)
        return prod(shape)

    def _skip_value(self, kind: int) -> None:
        if kind == STRING:
            self._skip_string()
        elif kind == ARRAY:
            self._skip_array(self.number("I"), self.number("Q"))
        else:
            self._skip(FIXED_BYTES[kind])

    def _skip_array(self, kind: int, length: int) -> None:
        if kind in FIXED_BYTES:
            self._skip(FIXED_BYTES[kind] * length)
            return
        for _ in range(length):
            self._skip_value(kind)

    def _skip_string(self) -> None:
        self._skip(self.number("Q"))

    def _skip(self, size: int) -> None:
        if self._file.tell() + size > self._size:
            raise EOFError
        self._file.seek(size, os.SEEK_CUR)
