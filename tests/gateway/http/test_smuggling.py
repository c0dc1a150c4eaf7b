"""One reading of every byte: what two servers could read in two ways is refused, and the connection with it.

Against the server as `loralane serve` wires it: its listener, its protocol, its event loop.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future
from threading import Thread

import pytest
from fakes import BASE, GatewayApp, build_gateway_app

from gateway.http.guard import GuardedProtocol
from gateway.serve.listeners import http_port
from gateway.serve.process import run_loop

HIDDEN = b"GET /version HTTP/1.1\r\nhost: here\r\n\r\n"
"""A request that another server might see where we see a body, or the other way round."""


class Wired:
    def __init__(self, gateway_app: GatewayApp, port: int) -> None:
        self.gateway_app, self.port = gateway_app, port

    def connect(self, receive_buffer: int = 0) -> socket.socket:
        connection = socket.socket()
        if receive_buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(20)
        connection.connect(("127.0.0.1", self.port))
        return connection

    def say(self, data: bytes) -> bytes:
        """All that is answered until the peer hangs up."""
        with self.connect() as connection:
            connection.sendall(data)
            return heard(connection)


def heard(connection: socket.socket) -> bytes:
    text = b""
    try:
        while piece := connection.recv(65536):
            text += piece
    except ConnectionResetError:
        pass
    return text


def statuses(text: bytes) -> list[int]:
    return [int(piece[:3]) for piece in text.split(b"HTTP/1.1 ")[1:]]


@pytest.fixture(scope="module")
def wired(tmp_path_factory) -> Iterator[Wired]:
    """With little patience."""
    root = tmp_path_factory.mktemp("adapters")
    ready: Future[tuple[Wired, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        gateway_app, leave = await build_gateway_app(root), asyncio.Event()
        gateway_app.engine.info.max_model_len = 100_000
        async with http_port(gateway_app.app, "127.0.0.1", 0) as port:
            ready.set_result((Wired(gateway_app, port), asyncio.get_running_loop(), leave))
            await leave.wait()

    with pytest.MonkeyPatch.context() as patch:
        for name in ("head_seconds", "body_seconds", "write_seconds"):
            patch.setattr(GuardedProtocol, name, 0.5)
        patch.setattr(GuardedProtocol, "min_rate", 2**30)
        thread = Thread(target=run_loop, args=(serve(),))
        thread.start()
        found, loop, leave = ready.result(60)
        yield found
        loop.call_soon_threadsafe(leave.set)
        thread.join()


def post(*headers: str, body: bytes = b"", version: str = "1.1", end: str = "\r\n") -> bytes:
    lines = [f"POST /v1/completions HTTP/{version}", "host: here", *headers]
    return end.join([*lines, "", ""]).encode() + body


CHUNKED, LENGTH = "transfer-encoding: chunked", f"content-length: {len(HIDDEN)}"
CHUNKS = b"0\r\n\r\n" + HIDDEN
TWO_READINGS = {
    "length, then chunks": post("content-length: 5", CHUNKED, body=CHUNKS),
    "chunks, then length": post(CHUNKED, "content-length: 5", body=CHUNKS),
    "chunks and no length": post(CHUNKED, "content-length: 0", body=CHUNKS),
    "two lengths": post("content-length: 0", LENGTH, body=HIDDEN),
    "two equal lengths": post(LENGTH, LENGTH, body=HIDDEN),
    "a list of lengths": post(f"content-length: 0, {len(HIDDEN)}", body=HIDDEN),
    "a length with a space": post("content-length: 1 2", body=HIDDEN),
    "a length with a sign": post("content-length: +5", body=HIDDEN),
    "an empty length": post("content-length: ", body=HIDDEN),
    "a length of 2^64": post(f"content-length: {2**64}", body=HIDDEN),
    "chunked twice": post(CHUNKED, CHUNKED, body=CHUNKS),
    "chunked, then something": post("transfer-encoding: chunked, gzip", body=CHUNKS),
    "almost chunked": post("transfer-encoding: xchunked", LENGTH, body=HIDDEN),
    "chunked with a tab": post("transfer-encoding:\tchunked\x0b", LENGTH, body=HIDDEN),
    "a space before the colon": post("content-length : 0", LENGTH, body=HIDDEN),
    "a tab before the colon": post("transfer-encoding\t: chunked", LENGTH, body=CHUNKS),
    "a space before the name": post(" content-length: 0", LENGTH, body=HIDDEN),
    "a folded line": post("x-a: b\r\n content-length: 0", LENGTH, body=HIDDEN),
    "a folded value": post("transfer-encoding:\r\n chunked", body=CHUNKS),
    "a bare line feed": post("x-a: b\ncontent-length: 0", LENGTH, body=HIDDEN),
    "only line feeds": post(LENGTH, body=HIDDEN, end="\n"),
    "a bare carriage return": post("x-a: b\rcontent-length: 0", LENGTH, body=HIDDEN),
    "a null": post("x-a: b\0c", LENGTH, body=HIDDEN),
    "no name": post(": b", LENGTH, body=HIDDEN),
    "no colon": post("content-length", LENGTH, body=HIDDEN),
    "a chunk of 2^64": post(CHUNKED, body=b"10000000000000000\r\n" + HIDDEN),
    "a chunk of -1": post(CHUNKED, body=b"-1\r\n" + HIDDEN),
    "a chunk of 0x5": post(CHUNKED, body=b"0x5\r\nhello\r\n" + CHUNKS),
    "a chunk ended by a line feed": post(CHUNKED, body=b"5\nhello\r\n" + CHUNKS),
    "a chunk with no end": post(CHUNKED, body=b"5\r\nhelloHTTP\r\n" + CHUNKS),
    "an extension with a line feed": post(CHUNKED, body=b"5;a\nb\r\nhello\r\n" + CHUNKS),
    "chunks of HTTP/1.0": post(CHUNKED, "content-length: 5", version="1.0", body=CHUNKS),
    "a version of its own": post(LENGTH, version="1.2", body=HIDDEN),
    "HTTP/0.9": b"GET /version\r\n\r\n",
}


@pytest.mark.parametrize("name", TWO_READINGS)
def test_what_could_be_read_in_two_ways_is_refused_with_its_connection(wired, name):
    assert statuses(wired.say(TWO_READINGS[name]))[-1:] == [400], "at the last"
    assert b'"version"' not in wired.say(TWO_READINGS[name])


def test_what_follows_a_refusal_is_not_read(wired):
    answer = wired.say(post("content-length: +5") + HIDDEN * 3)
    assert statuses(answer) == [400]
    assert b"connection: close" in answer


def test_what_follows_a_request_that_ends_the_connection_is_not_answered(wired):
    ending = HIDDEN.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    assert statuses(wired.say(ending + HIDDEN)) == [200]


@pytest.mark.parametrize("keep", ["", "connection: keep-alive\r\n"])
def test_an_old_client_gets_one_answer(wired, keep):
    """HTTP/1.0: nothing outlives the answer, whatever it asks for."""
    old = b"GET /version HTTP/1.0\r\n%s\r\n" % keep.encode()
    answer = wired.say(old + HIDDEN)
    assert statuses(answer) == [200]
    assert b"connection: close" in answer


def test_a_request_meant_for_a_proxy_leads_to_our_route_whatever_host_it_names(wired):
    """As RFC 9112 wants it; no name of a host counts for anything."""
    for target, status in ((b"http://elsewhere/version", 200), (b"http://elsewhere/nothing", 404)):
        whole = b"GET %s HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n" % target
        answer = wired.say(whole)
        assert statuses(answer) == [status]
        assert b"elsewhere" not in answer


# --- slow peers ---------------------------------------------------------------------------------------------------


def test_a_head_that_drips(wired):
    with wired.connect() as connection:
        try:
            for byte in b"GET /version HTTP/1.1\r\nx-a: " + b"a" * 400:
                connection.sendall(bytes([byte]))
                if wait_readable(connection, 0.02):
                    break
        except ConnectionError:
            return
        assert statuses(heard(connection)) == [400]


def wait_readable(connection: socket.socket, seconds: float) -> bool:
    connection.settimeout(seconds)
    try:
        connection.recv(1, socket.MSG_PEEK)
        return True
    except TimeoutError:
        return False
    finally:
        connection.settimeout(20)


def test_a_body_that_drips_and_a_connection_that_says_nothing(wired):
    with wired.connect() as silent, wired.connect() as dripping:
        dripping.sendall(post("content-length: 1000", "authorization: Bearer sk-acme", body=b"{"))
        assert statuses(heard(dripping)) == [400]
        assert heard(silent) == b""


def test_a_stream_that_the_client_does_not_read_is_cut_off_and_settled(wired):
    gateway_app = wired.gateway_app
    gateway_app.engine.reply = lambda sent: "x" * 20_000
    fields = {"model": BASE, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 30_000, "stream": True}
    body = json.dumps({**fields, "logprobs": True, "top_logprobs": 20}).encode()
    chat = post(f"content-length: {len(body)}", "authorization: Bearer sk-acme", body=body)
    with wired.connect(receive_buffer=4096) as connection:
        connection.sendall(chat.replace(b"/v1/completions", b"/v1/chat/completions"))
        for _ in range(1000):
            if gateway_app.watcher.records:
                break
            time.sleep(0.02)
    assert gateway_app.watcher.records[-1].outcome.status == 499
