"""A server elsewhere with OpenAI's API, of which a test says what it answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any


def delta(text: str = "", finish: str | None = None, **more: Any) -> dict[str, Any]:
    """An event of a stream."""
    told = {**({"content": text} if text else {}), **more}
    return {"choices": [{"index": 0, "delta": told, "finish_reason": finish}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}
ANSWER = (delta(role="assistant"), delta("From "), delta("the cloud"), delta(finish="stop"), USAGE, "[DONE]")


@dataclass
class FakeUpstream:
    """What the server answers, and what it was asked. Each request takes the next of `statuses`, then 200."""

    url: str = ""
    events: Sequence[dict[str, Any] | str] = ANSWER
    statuses: list[int] = field(default_factory=list)
    error: dict[str, Any] = field(default_factory=dict)
    content_type: str = "text/event-stream"
    body: Any = None
    """Sent as JSON in place of the events."""
    encoding: str = ""
    """Value of the header content-encoding; empty means that there is none."""
    go_on: asyncio.Event | None = None
    """The server waits for it before the event with the number `hold_at`."""
    hold_at: int = 2
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a client has left before the end."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0])
            self.headers.append(head)
            self.bodies.append(json.loads(await reader.readexactly(length)))
            await self._answer(reader, writer)
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        status = self.statuses.pop(0) if self.statuses else 200
        kind = self.content_type if status == 200 else "application/json"
        encoding = f"content-encoding: {self.encoding}\r\n" if self.encoding else ""
        head = f"HTTP/1.1 {status} x\r\ncontent-type: {kind}\r\n{encoding}connection: close\r\n\r\n"
        writer.write(head.encode())
        if status != 200:
            writer.write(json.dumps({"error": self.error}).encode())
            return
        if self.body is not None:
            writer.write(json.dumps(self.body).encode())
            return
        for number, event in enumerate(self.events):
            if number == self.hold_at and self.go_on is not None:
                waits = [asyncio.ensure_future(self.go_on.wait()), asyncio.ensure_future(reader.read())]
                await writer.drain()
                done, rest = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for one in rest:
                    one.cancel()
                if waits[1] in done:
                    self.left.set()
                    return
            text = event if isinstance(event, str) else json.dumps(event)
            writer.write(f"data: {text}\n\n".encode())
            await writer.drain()


@asynccontextmanager
async def running_upstream(**options: Any) -> AsyncIterator[FakeUpstream]:
    upstream = FakeUpstream(**options)
    server = await asyncio.start_server(upstream.serve, "127.0.0.1", 0)
    upstream.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    async with server:
        yield upstream
        server.close()
