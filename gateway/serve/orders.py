"""What a fleet says to its gateway processes and they to it, over a socket: orders first, then words, each a line."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from gateway.serve.launch import Ground, Launch

READY, LISTEN, LISTENING, ANNOUNCE = b"ready\n", b"listen\n", b"listening\n", b"announce\n"
FOLLOW, FOLLOWING, SEED = b"follow\n", b"following\n", b"seed\n"
"""Orders come after the first. The answer to the last is a line of JSON: adapters that cannot be served, and why."""


@dataclass(frozen=True, slots=True)
class Orders:
    """What a process is to serve."""

    number: int
    """Among its siblings, from 0."""
    launch: Launch
    ground: Ground

    def write(self, writer: asyncio.StreamWriter) -> None:
        """As data, checked on arrival as the configuration's file was: nothing in it can run."""
        text = msgspec.msgpack.encode(self, enc_hook=_written)
        writer.write(b"%d\n" % len(text) + text)

    @classmethod
    async def read(cls, reader: asyncio.StreamReader) -> Orders:
        """Raises msgspec.ValidationError."""
        text = await reader.readexactly(int(await reader.readline()))
        return msgspec.msgpack.decode(text, type=cls, dec_hook=_read)


def _written(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"orders cannot hold a {type(value).__name__}")


def _read(kind: type, value: Any) -> Path:
    if issubclass(kind, Path):
        return Path(value)
    raise TypeError(f"orders cannot hold a {kind.__name__}")
