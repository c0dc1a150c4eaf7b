"""Requests without a key take turns on the event loop, and the kernel keeps little of an answer that is not read."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, Router

from gateway.core.errors import ApiError, Fault
from gateway.http.edge import RequestMiddleware
from gateway.requests.turns import AT_ONCE
from gateway.requests.wire_room import WireRoom
from gateway.serve.addresses import SEND_BUFFER_BYTES, bind_socket

KEY = (b"authorization", b"Bearer sk-acme")
ANTHROPIC_KEY = (b"x-api-key", b"sk-acme")


@pytest.mark.parametrize(
    ("path", "header"), [("/openapi.json", KEY), ("/documents", (b"x-api-key", b"")), ("/documents", (b"accept", b"*"))]
)
async def test_few_requests_without_a_key_begin_in_one_iteration_of_the_loop(path, header):
    begun, ask = _asked()
    strangers = [asyncio.create_task(ask(path, header)) for _ in range(50)]
    await asyncio.sleep(0)
    assert begun == [path] * AT_ONCE
    await asyncio.gather(ask("/chats", KEY), ask("/messages", ANTHROPIC_KEY), ask("/health"))
    assert len(begun) < 20, "who has a key, and probes, wait for no stranger"
    await asyncio.gather(*strangers)
    assert begun.count(path) == 50


async def test_wrong_keys_are_refused_in_turns():
    sent, ask = _asked()
    strangers = [asyncio.create_task(ask("/refused", KEY)) for _ in range(50)]
    await asyncio.sleep(0)
    assert sent.count("401") == AT_ONCE
    await asyncio.gather(*strangers)
    assert sent.count("401") == 50


def test_the_kernel_keeps_little_of_an_answer_that_is_not_read():
    with closing(bind_socket("127.0.0.1", 0)) as listener, closing(socket.socket()) as peer:
        listener.listen()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.connect(listener.getsockname())
        with closing(listener.accept()[0]) as connection:
            connection.setblocking(False)
            sent = 0
            try:
                while sent < 2**23:
                    sent += connection.send(b"a" * 2**16)
            except BlockingIOError:
                pass
            assert 2**16 <= sent <= 2 * SEND_BUFFER_BYTES + 2**16


def _asked():
    """Return a list of the paths of all requests that have begun and the statuses of errors, and a function that sends
    a request."""
    begun: list[str] = []

    async def note(request: Request) -> Response:
        begun.append(request.url.path)
        if request.url.path == "/refused":
            raise ApiError(Fault.INVALID_API_KEY, "there is no such key")
        return PlainTextResponse("")

    paths = ("/documents", "/openapi.json", "/refused", "/chats", "/messages", "/health")
    router = Router([Route(path, note) for path in paths])
    app = RequestMiddleware(router, WireRoom())

    async def ask(path: str, *headers: tuple[bytes, bytes]) -> None:
        scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b""}
        await app({**scope, "headers": list(headers)}, _nothing, send)

    async def send(message: Mapping[str, Any]) -> None:
        if message.get("status", 200) >= 400:
            begun.append(str(message["status"]))

    return begun, ask


async def _nothing(*_messages: object) -> dict[str, str]:
    return {"type": "http.request"}
