"""Reads the header of a GGUF file: its values, which tensors it holds, and where, without reading the rest of the file.

Source: the specification of GGUF in the repository of ggml (docs/gguf.md).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, NamedTuple

from engine.process.model_source import gguf_parts

MAGIC = b"GGUF"
VERSIONS = (2, 3)
BEGINNINGS = [MAGIC + struct.pack("<I", version) for version in VERSIONS]
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""How the module struct names a metadata value by its type, for integers, floats and booleans."""
FIXED_BYTES = {kind: struct.calcsize(f"<{name}") for kind, name in NUMBERS.items()}
STRING, ARRAY = 8, 9
MOST_DIMENSIONS = 4
ALIGNMENT, ALIGNMENT_KEY = 32, "general.alignment"
"""Default of the alignment of tensors, in bytes, and the key of the metadata that changes it."""
SPLIT_COUNT, SPLIT_TENSORS = "split.count", "split.tensors.count"
"""Keys of the number of a model's parts, and of the tensors in all of them."""
MOST_READ = 1024
"""Maximum length of the metadata arrays that are read. Longer ones, such as a tokenizer's, are skipped."""
ARCHITECTURES = {
    **dict.fromkeys(("llama", "mistral", "mixtral"), "llama"),
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}
"""llama.cpp's name of an architecture, by the `model_type` of config.json: those of the GGUF files that are read."""
Value = str | int | float | tuple[float, ...] | None
"""A metadata value, where an array of numbers is a tuple. None means an array that was skipped, because it is longer
than MOST_READ or does not hold numbers."""


class StoredTensor(NamedTuple):
    """A tensor of a GGUF file: its shape, outputs first, its ggml type, and the offset of its data in bytes. `file` is
    the part that has it, None for the only file."""

    shape: tuple[int, ...]
    kind: int
    place: int
    file: Path | None = None


Array = Sequence[str] | Sequence[float]


class Header(NamedTuple):
    """The header of a GGUF file: metadata values, tensors, and the arrays that the caller wanted, by their names."""

    values: dict[str, Value]
    tensors: dict[str, StoredTensor]
    arrays: Mapping[str, Array] = MappingProxyType({})


def read_tensors(gguf: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a GGUF file, and of all other parts of its model, by their names. Raises ValueError as
    `read_model` does."""
    return read_model(gguf).tensors


def read_model(gguf: Path) -> Header:
    """Return the values of a GGUF file, the first part of its model, and the tensors of all parts. Raises ValueError as
    `read_header` does, and if a part is missing or does not belong to the others."""
    first, *others = parts = gguf_parts(gguf)
    header = _open_header(first, gguf.name)
    for part in others:
        tensors = _open_header(part, part.name).tensors
        if twice := header.tensors.keys() & tensors.keys():
            raise ValueError(f"{part.name} has tensor {min(twice)}, which another part has, too: fetch all parts again")
        header.tensors.update({name: stored._replace(file=part) for name, stored in tensors.items()})
    count, total = header.values.get(SPLIT_COUNT, 0), header.values.get(SPLIT_TENSORS)
    if count not in (0, len(parts)):
        raise ValueError(f"{first.name} is one of {count} parts: name the first, and give all of them their own names")
    if count and total not in (None, len(header.tensors)):
        raise ValueError(f"the parts of {first.name} have {len(header.tensors)} of {total} tensors: fetch them again")
    return header


def _open_header(path: Path, name: str) -> Header:
    with path.open("rb") as file:
        return read_header(file, os.fstat(file.fileno()).st_size, name)


def read_header(file: BinaryIO, size: int, name: str, arrays: Sequence[str] = ()) -> Header:
    """Return the header of an open file, whose first `size` bytes hold it, with the arrays of these keys. Raises
    ValueError, which names `name`, unless it is a sound GGUF file of version 2 or 3."""
    if file.read(len(MAGIC) + 4) not in BEGINNINGS:
        raise ValueError(f"{name} is no GGUF file of version {' or '.join(map(str, VERSIONS))}")
    try:
        return _HeaderReader(file, size, arrays).read()
    except (EOFError, KeyError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{name} is a damaged GGUF file") from error


class _HeaderReader:
    """Reads a header of at most `size` bytes from an open file, from behind its version. Raises EOFError, KeyError,
    UnicodeDecodeError or RecursionError if the file is damaged."""

    def __init__(self, file: BinaryIO, size: int, wanted: Sequence[str]) -> None:
        self._file, self._size, self._wanted = file, size, wanted
        self._arrays: dict[str, Array] = {}

    def bytes(self, size: int) -> bytes:
        found = self._file.read(min(size, self._size))
        if len(found) < size:
            raise EOFError
        return found

    def number(self, kind: str) -> int:
        """Read a little-endian unsigned integer. `kind` is I for 32 bits, Q for 64 bits."""
        return int(struct.unpack(f"<{kind}", self.bytes(struct.calcsize(f"<{kind}")))[0])

    def read(self) -> Header:
        num_tensors, num_values = self.number("Q"), self.number("Q")
        values = dict(self._value() for _ in range(num_values))
        described = [self._tensor() for _ in range(num_tensors)]
        alignment, end = values.get(ALIGNMENT_KEY), self._file.tell()
        data = end + -end % (alignment if isinstance(alignment, int) and alignment > 0 else ALIGNMENT)
        tensors = {name: stored._replace(place=data + stored.place) for name, stored in described}
        if len(tensors) < len(described):
            raise KeyError("two tensors have one name")
        return Header(values, tensors, self._arrays)

    def _value(self) -> tuple[str, Value]:
        key, kind = self.bytes(self.number("Q")).decode(), self.number("I")
        if kind == STRING:
            return key, self.bytes(self.number("Q")).decode(errors="replace")
        if kind in NUMBERS:
            return key, struct.unpack(f"<{NUMBERS[kind]}", self.bytes(FIXED_BYTES[kind]))[0]
        if kind == ARRAY and key in self._wanted:
            self._arrays[key] = self._whole_array(self.number("I"), self.number("Q"))
            return key, None
        if kind == ARRAY:
            return key, self._array(self.number("I"), self.number("Q"))
        raise KeyError(f"values of type {kind}")

    def _tensor(self) -> tuple[str, StoredTensor]:
        """Read the description of a tensor (name, dimensions, type, offset)."""
        name, count = self.bytes(self.number("Q")).decode(), self.number("I")
        if count > MOST_DIMENSIONS:
            raise EOFError
        shape = tuple(self.number("Q") for _ in range(count))[::-1]
        if prod(shape) > 1 << 48:
            raise EOFError
        return name, StoredTensor(shape, self.number("I"), self.number("Q"))

    def _array(self, kind: int, length: int) -> tuple[float, ...] | None:
        """Read an array of `length` values of type `kind` and return it. None means that the array was skipped: only
        arrays of up to MOST_READ numbers are kept."""
        if kind in NUMBERS and length <= MOST_READ:
            return struct.unpack(f"<{length}{NUMBERS[kind]}", self.bytes(FIXED_BYTES[kind] * length))
        if kind == STRING:
            self._skip_strings(length)
        elif kind == ARRAY:
            for _ in range(length):
                self._array(self.number("I"), self.number("Q"))
        else:
            self._skip(FIXED_BYTES[kind] * length)
        return None

    def _whole_array(self, kind: int, length: int) -> Array:
        """Read an array of strings or numbers, however long."""
        if kind == STRING:
            return [self.bytes(self.number("Q")).decode(errors="replace") for _ in range(length)]
        return struct.unpack(f"<{length}{NUMBERS[kind]}", self.bytes(FIXED_BYTES[kind] * length))

    def _skip_strings(self, count: int) -> None:
        """Skip `count` strings, of which a vocabulary has 100,000, by reading them: that is faster than seeking."""
        read = self._file.read
        for _ in range(count):
            length = read(8)
            size = int.from_bytes(length, "little")
            if len(length) < 8 or size > self._size or len(read(size)) < size:
                raise EOFError

    def _skip(self, size: int) -> None:
        if self._file.tell() + size > self._size:
            raise EOFError
        self._file.seek(size, os.SEEK_CUR)
