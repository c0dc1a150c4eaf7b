"""The header of a GGUF file, as its specification has it."""

import struct

UINT8, UINT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 0, 4, 6, 7, 8, 9, 10


def text(words):
    data = words.encode()
    return struct.pack("<Q", len(data)) + data


VALUES = [
    text("general.name") + struct.pack("<I", STRING) + text("tiny"),
    text("a.byte") + struct.pack("<IB", UINT8, 7),
    text("a.float") + struct.pack("<If", FLOAT32, 0.5),
    text("a.flag") + struct.pack("<I?", BOOL, True),
    text("a.long") + struct.pack("<IQ", UINT64, 2**40),
    text("some.numbers") + struct.pack("<IIQ3I", ARRAY, UINT32, 3, 1, 2, 3),
    text("some.words") + struct.pack("<IIQ", ARRAY, STRING, 2) + text("one") + text("two"),
    text("some.lists") + struct.pack("<IIQ", ARRAY, ARRAY, 1) + struct.pack("<IQ2B", UINT8, 2, 8, 9),
]


def tensor(name, shape):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 2, 0)


def header(shapes, version=3, values=VALUES):
    """The bytes of a file whose tensors have these shapes, up to where their data would begin."""
    tensors = b"".join(tensor(f"t{number}", shape) for number, shape in enumerate(shapes))
    return b"GGUF" + struct.pack("<IQQ", version, len(shapes), len(values)) + b"".join(values) + tensors
