"""A proxy between two processes that passes bytes on until it is told to cut, refuse, hold, delay or change them."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from pathlib import Path

PIECE = 1 << 16
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: closing tells the peer that the connection is gone, instead of that everything has been said."""


class Proxy:
    """Listens for clients of a server behind a unix socket or a TCP port (host, port), which may come and go."""

    def __init__(self, target: Path | tuple[str, int]) -> None:
        self.refusing = False
        """True if new connections are closed at once."""
        self.delay = 0.0
        """Seconds that every piece is kept, each way."""
        self.flipping = False
        """True if a byte of every other piece is changed."""
        self.limit: int | None = None
        """Bytes of the server that still pass before the proxy holds. None means no limit, as after it was reached."""
        self.num_begun = self.num_ended = 0
        """Number of connections so far, and of those that have ended."""
        self._target = target
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def listen_tcp(self) -> int:
        """Returns the port."""
        self._server = await asyncio.start_server(self._begin, "127.0.0.1", 0)
        return self._server.sockets[0].getsockname()[1]

    async def listen_unix(self, path: Path) -> None:
        self._server = await asyncio.start_unix_server(self._begin, path)

    def hold(self) -> None:
        """Pass nothing on from now on, and keep the connections open, as when a cable is out."""
        self._flowing.clear()

    def resume(self) -> None:
        self._flowing.set()

    def cut(self) -> None:
        """Abort every connection."""
        for writer in tuple(self._writers):
            _reset(writer)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.resume()
        self.cut()
        if self._serving:
            await asyncio.wait(self._serving)

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_begun += 1
        with _Kept(self._writers, writer):
            if self.refusing:
                return
            try:
                behind = await self._connect()
            except OSError:
                return
            with _Kept(self._writers, behind[1]):
                ways = [self._pump(reader, behind[1]), self._pump(behind[0], writer, is_limited=True)]
                tasks = [asyncio.create_task(way) for way in ways]
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
        self.num_ended += 1

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if isinstance(self._target, Path):
            return await asyncio.open_unix_connection(self._target)
        return await asyncio.open_connection(*self._target)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_limited: bool = False
    ) -> None:
        """Until either end is gone."""
        try:
            while piece := await reader.read(PIECE):
                if self.delay:
                    await asyncio.sleep(self.delay)
                await self._flowing.wait()
                if self.flipping and random.random() < 0.5:
                    piece = _flipped(piece)
                if is_limited and self.limit is not None:
                    piece = await self._pass_within_limit(piece, writer)
                writer.write(piece)
                await writer.drain()
        except OSError:
            pass  # that is what it is for

    async def _pass_within_limit(self, piece: bytes, writer: asyncio.StreamWriter) -> bytes:
        """Pass on what the limit lets through of a piece, and hold once it is reached. Returns the rest."""
        assert self.limit is not None
        passed = piece[: self.limit]
        self.limit = self.limit - len(passed) or None
        if self.limit is None:
            self.hold()
        writer.write(passed)
        await writer.drain()
        await self._flowing.wait()
        return piece[len(passed) :]


class _Kept:
    """A connection in the set of those that can be cut, for as long as it is served."""

    def __init__(self, writers: set[asyncio.StreamWriter], writer: asyncio.StreamWriter) -> None:
        self._writers, self._writer = writers, writer

    def __enter__(self) -> None:
        self._writers.add(self._writer)

    def __exit__(self, *exc: object) -> None:
        self._writers.discard(self._writer)
        self._writer.close()


def _flipped(piece: bytes) -> bytes:
    changed = bytearray(piece)
    changed[random.randrange(len(piece))] ^= random.randrange(1, 256)
    return bytes(changed)


def _reset(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    if connection is not None and connection.family == socket.AF_INET and not writer.is_closing():
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()
