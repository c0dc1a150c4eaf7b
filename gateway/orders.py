"""What a fleet says to its gateway processes and they to it, over a socket: orders first, then words, each a line."""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import dataclass

from gateway.launch import Ground, Launch

READY, LISTEN, LISTENING, ANNOUNCE = b"ready\n", b"listen\n", b"listening\n", b"announce\n"


@dataclass(frozen=True, slots=True)
class Orders:
    """What a process is to serve."""

    number: int
    """Among its siblings, from 0."""
    launch: Launch
    ground: Ground

    def write(self, writer: asyncio.StreamWriter) -> None:
        text = pickle.dumps(self)
        writer.write(b"%d\n" % len(text) + text)

    @classmethod
    async def read(cls, reader: asyncio.StreamReader) -> Orders:
        """From the process that started this one, and nobody else: a pickle is trusted."""
        orders = pickle.loads(await reader.readexactly(int(await reader.readline())))
        assert isinstance(orders, cls)
        return orders
