"""A completions server for the bench client's tests: streams what it is told to, badly if it is told so."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


@dataclass
class FakeServer:
    """What it does is decided by a request's `model`; what it saw is kept."""

    url: str = ""
    bodies: list[dict] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)
    """Answers of /metrics to come."""
    chat_gap_s: float = 0.001
    """Seconds between the tokens of a chat."""

    async def exposition(self, request: Request) -> Response:
        return Response(self.metrics.pop(0)) if self.metrics else Response(status_code=403)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "good"}, {"id": "adapter"}]})

    async def completions(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("authorization"))
        if body["model"] == "full":
            return JSONResponse({"error": {"code": "lane_queue_full", "message": "no"}}, 503)
        if body["model"] == "plain":
            return Response("gone fishing", 500)
        return StreamingResponse(ANSWERS.get(body["model"], good)(body), media_type="text/event-stream")

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        return StreamingResponse(chatting(body, self.chat_gap_s), media_type="text/event-stream")


async def chatting(body: dict, gap_s: float) -> AsyncIterator[bytes]:
    """Stream the role, one token in each chunk, the end and the usage, as servers without token ids do."""
    yield delta({"role": "assistant", "content": ""})
    for _ in range(body["max_completion_tokens"]):
        yield delta({"content": "x"})
        await asyncio.sleep(gap_s)
    yield delta({}, "length")
    counts = {"prompt_tokens": 9, "completion_tokens": body["max_completion_tokens"]}
    yield b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


def delta(added: dict, finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": added, "finish_reason": finish_reason}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


async def good(body: dict) -> AsyncIterator[bytes]:
    """Stream one token in each chunk, then the usage."""
    yield b": a comment\n\n"
    for index in range(body["max_tokens"]):
        yield chunk([7], "length" if index == body["max_tokens"] - 1 else None)
        await asyncio.sleep(0.001)
    yield usage(body)
    yield b"data: [DONE]\n\n"


async def pairs(body: dict) -> AsyncIterator[bytes]:
    """Stream two tokens in each chunk, without token ids, with CRLF line ends, in pieces that end inside lines."""
    frames = b"".join(chunk(None).replace(b"\n", b"\r\n") for _ in range(body["max_tokens"] // 2))
    for start in range(0, len(frames), 50):
        yield frames[start : start + 50]
        await asyncio.sleep(0.002)
    yield usage(body) + b"data: [DONE]\n\n"


async def broken(body: dict) -> AsyncIterator[bytes]:
    yield chunk([7])
    raise ConnectionAbortedError


async def short(body: dict) -> AsyncIterator[bytes]:
    """Ends as if all were well, without saying that it is done."""
    yield chunk([7])


async def failing(body: dict) -> AsyncIterator[bytes]:
    yield chunk([7])
    yield b'data: {"error": {"code": "deadline_exceeded", "message": "too late"}}\n\n'
    yield b"data: [DONE]\n\n"


async def garbled(body: dict) -> AsyncIterator[bytes]:
    yield b"data: {nonsense\n\n"
    await asyncio.sleep(5)


async def silent(body: dict) -> AsyncIterator[bytes]:
    await asyncio.sleep(5)
    yield b""


ANSWERS = {
    "pairs": pairs,
    "broken": broken,
    "short": short,
    "failing": failing,
    "garbled": garbled,
    "silent": silent,
}


def chunk(token_ids: list[int] | None, finish_reason: str | None = None) -> bytes:
    ids = {} if token_ids is None else {"token_ids": token_ids}
    choice = {"index": 0, "text": "x", "finish_reason": finish_reason, **ids}
    return b"data: " + json.dumps({"choices": [choice], "usage": None}).encode() + b"\n\n"


def usage(body: dict) -> bytes:
    counts = {
        "prompt_tokens": len(body["prompt"]),
        "completion_tokens": body["max_tokens"],
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    return b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\n"


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    """On a free port, in a thread of its own: the client brings its own event loop."""
    fake = FakeServer()
    routes = [
        Route("/v1/models", fake.models),
        Route("/metrics", fake.exposition),
        Route("/v1/completions", fake.completions, methods=["POST"]),
        Route("/v1/chat/completions", fake.chat, methods=["POST"]),
    ]
    config = uvicorn.Config(Starlette(routes=routes), port=0, log_level="critical", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    fake.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield fake
    finally:
        server.should_exit = True
        thread.join()
