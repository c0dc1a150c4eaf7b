"""Finds under which path an adapter knows the decoder that is `model.` here, and renames its tensors: `AutoModel` (task
FEATURE_EXTRACTION) is the decoder itself, and an image model has it as its text part."""

from __future__ import annotations

import re

HERE = "model."
BEGIN = b'"base_model.model.'
ROOTS = ("", "model.language_model.", "language_model.model.", "language_model.")
"""Paths of the decoder in other wrappers: `AutoModel`'s, and image models' of transformers 5 and before."""
LENGTH_BYTES = 8
"""Size of the number of a safetensors file that says how long its header is."""


def find_root(data: memoryview) -> str:
    """Return the path of the decoder in the model that an adapter's weights file, in safetensors, was trained on. It is
    HERE if the file is damaged or names no layers."""
    header = bytes(data[LENGTH_BYTES : LENGTH_BYTES + _header_bytes(data)])
    if BEGIN + HERE.encode() + b"layers." in header:
        return HERE
    return next((root for root in ROOTS if BEGIN + root.encode() + b"layers." in header), HERE)


def renamed(data: memoryview, root: str) -> memoryview:
    """Return a weights file whose tensors of the decoder at `root` have the names of one at HERE, in memory of its own;
    the file itself if `root` is HERE."""
    if root == HERE:
        return data
    size = _header_bytes(data)
    header, body = bytes(data[LENGTH_BYTES : LENGTH_BYTES + size]), data[LENGTH_BYTES + size :]
    if root:
        header = header.replace(BEGIN + root.encode(), BEGIN + HERE.encode())
        wrapper = root.removesuffix(HERE).encode()
        header = header.replace(BEGIN + wrapper + b"lm_head.", BEGIN + b"lm_head.")
    else:
        header = re.sub(re.escape(BEGIN) + rb"(?=layers\.|embed_tokens\.)", BEGIN + HERE.encode(), header)
    header += b" " * (-len(header) % LENGTH_BYTES)  # safetensors aligns tensors, and allows spaces behind the header
    return memoryview(len(header).to_bytes(LENGTH_BYTES, "little") + header + body)


def _header_bytes(data: memoryview) -> int:
    """Return the length of a file's header, 0 if the file is shorter than that."""
    size = int.from_bytes(data[:LENGTH_BYTES], "little")
    return size if size <= len(data) - LENGTH_BYTES else 0
