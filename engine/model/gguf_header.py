"""Reads the header of a GGUF file to find out which tensors it holds and where, without reading the rest of the file.

Source: the specification of GGUF in the repository of ggml (docs/gguf.md).
"""

from __future__ import annotations

import os
import struct
from math import prod
from pathlib import Path
from typing import BinaryIO, NamedTuple

MAGIC = b"GGUF"
VERSIONS = (2, 3)
BEGINNINGS = [MAGIC + struct.pack("<I", version) for version in VERSIONS]
FIXED_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Size in bytes of a metadata value by its type, for integers, floats and booleans."""
STRING, ARRAY = 8, 9
MOST_DIMENSIONS = 4
ALIGNMENT, ALIGNMENT_KEY = 32, b"general.alignment"
"""Default of the alignment of tensors, in bytes, and the key of the metadata that changes it."""
UINT32 = 4


class StoredTensor(NamedTuple):
    """A tensor of a GGUF file: its shape, with the outputs first, its ggml type, and the place of its data in bytes."""

    shape: tuple[int, ...]
    kind: int
    place: int


def read_tensors(gguf: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a GGUF file by their names. Raises ValueError if the file is no GGUF file of version 2 or
    3, or is damaged."""
    with gguf.open("rb") as file:
        if file.read(len(MAGIC) + 4) not in BEGINNINGS:
            raise ValueError(f"{gguf} is no GGUF file of version {' or '.join(map(str, VERSIONS))}")
        try:
            return _Header(file).tensors()
        except (EOFError, KeyError, UnicodeDecodeError) as error:
            raise ValueError(f"{gguf} is a damaged GGUF file") from error


class _Header:
    """Reads a header from an open file, from behind its version. Raises EOFError or KeyError if the file is damaged."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        self._alignment = ALIGNMENT

    def bytes(self, size: int) -> bytes:
        found = self._file.read(min(size, self._size))
        if len(found) < size:
            raise EOFError
        return found

    def number(self, kind: str) -> int:
        """Read a little-endian unsigned integer. `kind` is I for 32 bits, Q for 64 bits."""
        return int(struct.unpack(f"<{kind}", self.bytes(struct.calcsize(f"<{kind}")))[0])

    def tensors(self) -> dict[str, StoredTensor]:
        num_tensors, num_values = self.number("Q"), self.number("Q")
        for _ in range(num_values):
            self._value()
        described = [self._tensor() for _ in range(num_tensors)]
        end = self._file.tell()
        data = end + -end % self._alignment
        return {name: stored._replace(place=data + stored.place) for name, stored in described}

    def _value(self) -> None:
        key, kind = self.bytes(self.number("Q")), self.number("I")
        if key == ALIGNMENT_KEY and kind == UINT32:
            self._alignment = self.number("I") or ALIGNMENT
        else:
            self._skip_value(kind)

    def _tensor(self) -> tuple[str, StoredTensor]:
        """Read the description of a tensor (name, dimensions, type, offset)."""
        name, count = self.bytes(self.number("Q")).decode(), self.number("I")
        if count > MOST_DIMENSIONS:
            raise EOFError
        shape = tuple(self.number("Q") for _ in range(count))[::-1]
        if prod(shape) > 1 << 48:
            raise EOFError
        return name, StoredTensor(shape, self.number("I"), self.number("Q"))

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
