"""The bytes that tokens stand for, as vocabularies spell them."""

from __future__ import annotations

import re

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Return the alphabet of byte-level BPE (GPT-2): for each of its 256 printable characters, the byte that it
    represents."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
_OTHERS = [chr(code) for code in range(128, 256) if chr(code) not in _BYTE_OF]
"""Characters of Latin-1 that represent no byte and are more than one byte in UTF-8."""
_LATIN_OF = str.maketrans({char: chr(byte) for char, byte in _BYTE_OF.items()} | dict.fromkeys(_OTHERS, "\u0100"))
"""Translates the alphabet to Latin-1, and `_OTHERS` to a character that Latin-1 lacks."""


def byte_level_bytes(piece: str) -> bytes:
    """Return the bytes of a token of byte-level BPE."""
    try:
        return piece.translate(_LATIN_OF).encode("latin-1")
    except UnicodeEncodeError:  # of an added token, whose characters may stand for themselves
        return b"".join(bytes([_BYTE_OF[c]]) if c in _BYTE_OF else c.encode() for c in piece)


def piece_bytes(piece: str) -> bytes:
    """Return the bytes of a SentencePiece token: one byte if written as <0xAB>, else its text (U+2581 is a space)."""
    match = _BYTE_PIECE.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match else piece.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()
