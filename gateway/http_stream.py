"""Answers on the wire: server-sent events or one body, for as long as the client listens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.core.errors import ApiError, internal
from gateway.core.tenants import Principal
from gateway.generation import Admitted, GenerateRequest, Generation, Usage
from gateway.openai_render import Envelope, Style
from gateway.service import Gateway

log = structlog.get_logger("http")

encode_json = msgspec.json.Encoder().encode

STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


@dataclass(frozen=True, slots=True)
class GenerationResponse:
    """An ASGI response that generates while it is sent. Errors before the first byte are raised."""

    gateway: Gateway
    principal: Principal
    request: GenerateRequest
    style: Style
    stream: bool
    include_usage: bool
    ping_seconds: float

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = self._stream(send) if self.stream else self._whole(scope, receive, send)
        await while_connected(receive, work)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.gateway.generate(self.principal, self.request) as generation:
            chunks = [chunk async for chunk in generation]
            admitted = generation.admitted
            response = json_response(self._envelope(admitted).whole(chunks), headers=admitted.headers())
        await response(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        events = EventStream(send)
        try:
            async with self.gateway.generate(self.principal, self.request) as generation:
                envelope = self._envelope(generation.admitted)
                await events.open(generation.admitted.headers())
                async with events.pings(self.ping_seconds):
                    usage = await self._chunks(events, generation, envelope)
            await events.data(envelope.usage(usage) if usage else None)
            await events.done()
        except (ApiError, OSError) as error:
            if not events.is_open or isinstance(error, OSError):
                raise
            await events.data(error.body())
        except Exception:
            if not events.is_open:
                raise
            log.exception("stream_failed", request_id=self.request.request_id)
            await events.data(internal(self.request.request_id).body())
        await events.close()

    async def _chunks(self, events: EventStream, generation: Generation, envelope: Envelope) -> Usage | None:
        usage = None
        for index in range(len(generation.admitted.prompts) * self.request.n):
            await events.data(envelope.opening(index))
        async for chunk in generation:
            await events.data(envelope.delta(chunk))
            usage = chunk.usage
        return usage

    def _envelope(self, admitted: Admitted) -> Envelope:
        return Envelope(self.style, admitted, include_usage=self.include_usage)


class EventStream:
    """Server-sent events. Every event is one ASGI message, so pings may come between any two."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.is_open = False

    async def open(self, headers: Mapping[str, str]) -> None:
        raw = [(name.encode(), value.encode()) for name, value in {**STREAM_HEADERS, **headers}.items()]
        self.is_open = True
        await self._send({"type": "http.response.start", "status": 200, "headers": raw})

    async def data(self, body: dict[str, Any] | None) -> None:
        if body is not None:
            await self._write(b"data: " + encode_json(body) + b"\n\n")

    async def done(self) -> None:
        await self._write(b"data: [DONE]\n\n")

    async def close(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    @asynccontextmanager
    async def pings(self, seconds: float) -> AsyncIterator[None]:
        """Keeps proxies from giving a silent stream up."""
        pinger = asyncio.create_task(self._ping(seconds))
        try:
            yield
        finally:
            pinger.cancel()
            await asyncio.wait((pinger,))

    async def _ping(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            await self._write(b": ping\n\n")

    async def _write(self, frame: bytes) -> None:
        await self._send({"type": "http.response.body", "body": frame, "more_body": True})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` to its end, or cancels it as soon as the client is gone; then nothing more needs to be said."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_until_gone(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
    if not task.cancelled():
        task.result()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode_json(body), status, headers, media_type="application/json")
