"""Protocol between the fleet and a gateway process over a socket: the orders first, then one-word lines both ways."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from gateway.serve.backends import Backends
from gateway.serve.launch import Launch, decode, encode

READY, LISTEN, LISTENING, ANNOUNCE = b"ready\n", b"listen\n", b"listening\n", b"announce\n"
FOLLOW, FOLLOWING, SEED = b"follow\n", b"following\n", b"seed\n"
"""Lines that apply another configuration. The fleet sends FOLLOW and then new orders; the process answers FOLLOWING
when it has applied their settings. The fleet sends SEED to one process, which writes the tenants and adapters to the
registries and answers with a line of JSON: adapter -> reason for adapters that cannot be served."""


@dataclass(frozen=True, slots=True)
class Orders:
    """Message from the fleet to its process `number`: which configuration to serve, with which store and engine."""

    number: int
    """Index of the process in the fleet, from 0."""
    launch: Launch
    backends: Backends

    def write(self, writer: asyncio.StreamWriter) -> None:
        """Write the orders to a stream as msgpack, after a line with their length in bytes; does not wait. They are
        data and cannot carry code; `read` validates them like the configuration file."""
        text = encode(self)
        writer.write(b"%d\n" % len(text) + text)

    @classmethod
    async def read(cls, reader: asyncio.StreamReader) -> Orders:
        """Read and validate the orders that `write` wrote. Raises msgspec.ValidationError if they are invalid, and
        asyncio.IncompleteReadError or ValueError if the stream ends."""
        text = await reader.readexactly(int(await reader.readline()))
        return decode(text, cls)
