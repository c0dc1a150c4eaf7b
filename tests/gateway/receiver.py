"""A server on loopback that receives webhooks, and can be told to do it badly."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


def status(code: int, *headers: str) -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        lines = [f"HTTP/1.1 {code} X", "content-length: 0", *headers, "", ""]
        writer.write("\r\n".join(lines).encode())
        await writer.drain()

    return answer


async def hang(writer: asyncio.StreamWriter) -> None:
    """Until the sender has enough of it."""
    while not writer.transport.is_closing():
        await asyncio.sleep(0.01)


async def drip(writer: asyncio.StreamWriter) -> None:
    """Informational answers, one after the other: never silent, and never done."""
    while not writer.transport.is_closing():
        writer.write(b"HTTP/1.1 102 Processing\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(0.01)


async def flood(writer: asyncio.StreamWriter) -> None:
    """Received, with an answer that never ends."""
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000000\r\n\r\n")
    while not writer.transport.is_closing():
        writer.write(b"x" * 65536)
        await writer.drain()


async def bloat(writer: asyncio.StreamWriter) -> None:
    """Headers that never end."""
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while not writer.transport.is_closing():
        writer.write(b"x: " + b"y" * 65536 + b"\r\n")
        await writer.drain()


@dataclass
class Received:
    line: str
    headers: dict[str, str]
    body: bytes

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]


@dataclass
class Receiver:
    """Answers as the script says, one request after the other, and 204 when that is through."""

    port: int = 0
    script: list[Answer] = field(default_factory=list)
    received: list[Received] = field(default_factory=list)
    connections: int = 0
    names: list[str] = field(default_factory=list)
    """Server names asked for by TLS."""

    @property
    def ids(self) -> list[str]:
        return [each.id for each in self.received]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(OSError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            fields = [line.partition(": ") for line in head[1:] if line]
            headers = {name.lower(): value for name, _, value in fields}
            body = await reader.readexactly(int(headers["content-length"]))
            answer = self.script.pop(0) if self.script else status(204)
            self.received.append(Received(head[0], headers, body))
            await answer(writer)
        writer.close()


@asynccontextmanager
async def receiving(tls: ssl.SSLContext | None = None) -> AsyncIterator[Receiver]:
    receiver = Receiver()
    if tls is not None:
        tls.sni_callback = lambda _, name, __: receiver.names.append(name)
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", 0, ssl=tls)
    receiver.port = server.sockets[0].getsockname()[1]
    try:
        yield receiver
    finally:
        server.close()
