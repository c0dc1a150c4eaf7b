"""What requests may hold on their way in and out: trailers, heads, bodies in arrival, requests sent ahead, answers."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Callable, Iterator

import pytest
from fakes import BASE, GatewayApp, build_gateway_app
from raw_http import closed, connect, read, read_one, request
from served import Served, served

from gateway.core.limits import Limits
from gateway.core.tenants import Tenant
from gateway.http import app
from gateway.http.guard import GuardedProtocol
from gateway.http.peer import WritingTime
from gateway.http.settings import MAX_BODY_BYTES, MAX_CONTROL_BYTES
from gateway.requests.wire_room import REQUEST_BYTES, STRANGERS, TENANT_BYTES

CHAT = json.dumps({"model": BASE, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}).encode()
STREAM = CHAT[:-1] + b', "stream": true, "seed": 1}'
CHUNKED = "transfer-encoding: chunked"
HIDDEN = b"GET /version HTTP/1.1\r\nhost: here\r\n\r\n"


class Watchful(GuardedProtocol):
    peer_seconds = 0.05
    write_seconds = 0.5
    min_rate = 2**20


@pytest.fixture(scope="module")
def gateway(tmp_path_factory) -> Iterator[Served]:
    """Lets little pile up in the kernel, and looks often whether peers have left."""
    with served(tmp_path_factory.mktemp("adapters"), protocol=Watchful, send_buffer=4096) as running:
        running.gateway_app.engine.info.max_model_len = 10**7
        yield running
        running.run(running.gateway_app.assert_empty())
        assert running.gateway_app.gateway.wire.total == 0


@pytest.fixture
def waiting(gateway) -> Iterator[Served]:
    """An engine that waits after the first token of each request until the test is over."""
    engine = gateway.gateway_app.engine
    until(gateway, lambda: gateway.gateway_app.gateway.active == 0)
    engine.requests.clear()
    engine.ends.clear()
    engine.go_on = asyncio.Event()
    yield gateway
    gateway.loop.call_soon_threadsafe(engine.go_on.set)
    until(gateway, lambda: engine.open == 0)
    engine.go_on = None


def until(gateway: Served, condition: Callable[[], bool]) -> None:
    """Wait on the gateway's loop."""

    async def wait() -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.01)

    gateway.run(wait())


def chunked(body: bytes, trailers: bytes = b"") -> bytes:
    return b"%x\r\n%b\r\n0\r\n%b\r\n" % (len(body), body, trailers)


def reset(connection: socket.socket) -> None:
    """Close a connection with RST instead of FIN."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def sent_until_refused(connection: socket.socket, piece: bytes, most: int) -> int:
    """Send a piece again and again; returns the bytes that were taken until the peer hung up."""
    sent = 0
    try:
        while sent < most:
            connection.sendall(piece)
            sent += len(piece)
    except ConnectionError:
        pass
    return sent


# --- trailers and framing -----------------------------------------------------------------------------------------


def test_trailers_are_no_headers(gateway):
    with connect(gateway) as connection:
        head = request(b"", CHUNKED).replace(b"authorization: Bearer sk-acme\r\n", b"")
        connection.sendall(head + chunked(CHAT, b"authorization: Bearer sk-acme\r\n"))
        read(connection).check(401, "invalid_api_key")
    with connect(gateway) as connection:
        connection.sendall(request(b"", CHUNKED, "x-request-id: mine"))
        connection.sendall(chunked(CHAT, b"authorization: none\r\nx-request-id: another\r\n"))
        answer = read(connection)
        assert (answer.status, answer.headers["x-request-id"]) == (200, "mine")


@pytest.mark.parametrize("piece", [b"a:b\r\n" * 1000, b"a" * 5000], ids=["many trailers", "one trailer"])
@pytest.mark.parametrize("start", [b"0\r\n", b"0\r\na:"], ids=["between", "within"])
def test_trailers_count_like_headers(gateway, piece, start):
    with connect(gateway) as connection:
        connection.sendall(request(b"", CHUNKED) + b"2\r\n{}\r\n" + start)
        assert sent_until_refused(connection, piece, 2**26) < 2**26


def test_trailers_that_are_too_large_are_refused_by_name(gateway):
    with connect(gateway) as connection:
        connection.sendall(request(b"", CHUNKED) + b"2\r\n{}\r\n0\r\n" + b"a:b\r\n" * 80_000)
        read(connection).check(413, "request_too_large", "headers")


def test_extensions_of_chunks_are_bounded(gateway):
    with connect(gateway) as connection:
        connection.sendall(request(b"", CHUNKED) + b"2;a=")
        assert sent_until_refused(connection, b"b" * 5000, 2**26) < 2**26


def test_a_body_in_small_chunks_is_read(gateway):
    with connect(gateway) as connection:
        text = b" " * 160_000 + CHAT
        pieces = b"".join(b"10;a=b\r\n%b\r\n" % text[at : at + 16].rjust(16) for at in range(0, len(text), 16))
        connection.sendall(request(b"", CHUNKED) + pieces + b"0\r\n\r\n")
        assert read(connection).status == 200


def test_strangers_heads_are_bounded_together_and_keep_nobody_out(gateway):
    room = gateway.gateway_app.gateway.wire
    bound, room.strangers_bytes = room.strangers_bytes, 80_000
    head = b"GET /health HTTP/1.1\r\nx-a: " + b"a" * 40_000
    held = [connect(gateway) for _ in range(2)]
    try:
        for connection in held:
            connection.sendall(head)
        until(gateway, lambda: room.held(STRANGERS) > 60_000)
        with connect(gateway) as connection:
            connection.sendall(head)
            read(connection).check(503, "overloaded", "callers that have not authenticated")
        with connect(gateway) as connection:
            connection.sendall(request(CHAT))
            assert read(connection).status == 200
    finally:
        room.strangers_bytes = bound
        for connection in held:
            connection.close()
    until(gateway, lambda: room.total == 0)


# --- requests sent ahead, and peers that leave -----------------------------------------------------------------------


def test_one_request_of_a_connection_is_begun_at_a_time(waiting):
    engine = waiting.gateway_app.engine
    with connect(waiting) as connection:
        connection.sendall(request(CHAT) * 3)
        until(waiting, lambda: len(engine.requests) == 1)
        with connect(waiting) as other:
            other.sendall(request(b"", method="GET", path="/health"))
            assert read(other).status == 200
        assert len(engine.requests) == 1
        waiting.loop.call_soon_threadsafe(engine.go_on.set)
        for _ in range(3):
            assert read_one(connection)["object"] == "chat.completion"
    assert len(engine.requests) == 3


@pytest.mark.parametrize("leave", [socket.socket.close, reset])
@pytest.mark.parametrize("ahead", [0, 1, 500, 20_000])
def test_who_leaves_after_sending_ahead_ends_what_runs(waiting, leave, ahead, caplog):
    gateway_app = waiting.gateway_app
    before = len(gateway_app.watcher.records)
    connection = connect(waiting)
    connection.setblocking(False)
    connection.send(request(STREAM) * (ahead + 1))
    until(waiting, lambda: len(gateway_app.engine.requests) == 1)
    leave(connection)
    until(waiting, lambda: len(gateway_app.watcher.records) > before)
    assert [record.finish for record in gateway_app.watcher.records[before:]] == ["cancelled"]
    assert len(gateway_app.engine.requests) == 1
    assert "Traceback" not in caplog.text


def test_a_request_behind_chunks_gets_no_answer_and_loses_nothing(gateway):
    with connect(gateway) as connection:
        connection.sendall(request(b"", CHUNKED) + chunked(CHAT) + HIDDEN)
        answer = read(connection)
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert closed(connection)


# --- Upgrade and HTTP/1.0 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["h2c", "websocket", "foo"])
@pytest.mark.parametrize("split", [0, 20, -1, -10])
@pytest.mark.parametrize("framing", ["length", "chunks"])
def test_an_upgrade_is_ignored_and_its_body_kept(gateway, protocol, split, framing):
    headers = ["connection: Upgrade, HTTP2-Settings", f"upgrade: {protocol}", "http2-settings: AAMAAABkAAQAoAAAAAIA"]
    body = CHAT if framing == "length" else chunked(CHAT)
    whole = request(body, *headers, *([] if framing == "length" else [CHUNKED]))
    with connect(gateway) as connection:
        connection.sendall(whole[:split])
        if split:
            gateway.run(asyncio.sleep(0.02))
        connection.sendall(whole[split:])
        assert read_one(connection)["object"] == "chat.completion"
        connection.sendall(HIDDEN)
        assert "version" in read_one(connection)


def test_a_body_behind_an_upgrade_is_no_request(gateway):
    for path in ("/v1/chat/completions", "/health"):
        with connect(gateway) as connection:
            method = "GET" if path == "/health" else "POST"
            whole = request(HIDDEN, "connection: upgrade", "upgrade: foo", method=method, path=path)
            connection.sendall(whole + request(b"", "connection: close", method="GET", path="/nothing"))
            text = b""
            while piece := connection.recv(65536):
                text += piece
        assert text.count(b"HTTP/1.1 ") == 2 and b'"version"' not in text


@pytest.mark.parametrize("keep", [[], ["connection: keep-alive"]])
def test_a_client_of_http_1_0_gets_a_stream_without_chunks(gateway, keep):
    with connect(gateway) as connection:
        connection.sendall(request(STREAM, *keep).replace(b"HTTP/1.1", b"HTTP/1.0"))
        answer = read(connection)
    assert "transfer-encoding" not in answer.headers and answer.headers["connection"] == "close"
    assert answer.body.startswith(b"data: ") and answer.body.endswith(b"data: [DONE]\n\n")


def test_a_client_of_http_1_0_gets_other_answers_with_their_length(gateway):
    for body, status in ((CHAT, 200), (b"{", 400)):
        with connect(gateway) as connection:
            connection.sendall(request(body).replace(b"HTTP/1.1", b"HTTP/1.0"))
            answer = read(connection)
            assert (answer.status, int(answer.headers["content-length"])) == (status, len(answer.body))


# --- bodies in arrival --------------------------------------------------------------------------------------------


def arriving(gateway: Served, *headers: str, body: bytes = b"{", path: str = "/v1/chat/completions") -> socket.socket:
    """A connection whose request lacks the rest of its body."""
    connection = connect(gateway)
    connection.sendall(request(body, *headers, path=path))
    return connection


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/v1/messages/count_tokens"])
def test_bodies_in_arrival_are_bounded_by_tenant(gateway, path):
    """150 bodies of 8 MiB were 1.4 GB."""
    room = gateway.gateway_app.gateway.wire
    declared = f"content-length: {MAX_BODY_BYTES}"
    held = [arriving(gateway, declared, path=path) for _ in range(20)]
    try:
        refused = 0
        for connection in held[7:]:
            answer = read(connection)
            refused += answer.status == 429
            assert b"send this request again when fewer requests are under way" in answer.body
            assert answer.headers["retry-after"] == "1"
        assert refused == 13
        assert 7 * MAX_BODY_BYTES < room.held("acme") <= TENANT_BYTES
        with connect(gateway) as connection:
            connection.sendall(request(CHAT).replace(b"sk-acme", b"sk-globex"))
            assert read(connection).status == 200
    finally:
        for connection in held:
            connection.close()
    until(gateway, lambda: room.total == 0)


def test_chunks_count_as_they_arrive(gateway):
    room = gateway.gateway_app.gateway.wire
    with arriving(gateway, CHUNKED, body=b"%x\r\n" % MAX_BODY_BYTES + b"x" * 3_000_000):
        until(gateway, lambda: room.held("acme") > 3_000_000)
        assert room.held("acme") < 3_000_000 + REQUEST_BYTES + 1000
    until(gateway, lambda: room.total == 0)


def test_a_tenant_has_no_more_long_bodies_in_arrival_than_slots(gateway, monkeypatch):
    tenant = Tenant("acme", limits=Limits(concurrent_requests=1))
    monkeypatch.setattr(gateway.gateway_app.gateway.wire, "bound", lambda _: type(room).bound(room, tenant))
    room = gateway.gateway_app.gateway.wire
    declared = f"content-length: {MAX_BODY_BYTES - 10_000}"
    with arriving(gateway, declared), arriving(gateway, declared) as second:
        read(second).check(429, "rate_limit_exceeded", f"of at most {MAX_BODY_BYTES:,}")
    until(gateway, lambda: room.total == 0)


def test_a_long_body_is_not_read_while_its_tenant_has_no_slot(waiting):
    limiter, engine = waiting.gateway_app.limiter, waiting.gateway_app.engine
    waiting.run(limiter.configure([Tenant("acme", limits=Limits(concurrent_requests=1))]))
    try:
        with connect(waiting) as running:
            running.sendall(request(CHAT))
            until(waiting, lambda: len(engine.requests) == 1)
            for headers in (f"content-length: {MAX_BODY_BYTES}", CHUNKED):
                with arriving(waiting, headers, body=b"") as late:
                    read(late).check(429, "rate_limit_exceeded", "1 requests at once")
    finally:
        waiting.run(limiter.configure([]))


# --- answers ------------------------------------------------------------------------------------------------------


def test_unread_answers_count_in_their_tenants_room_until_they_are_cut_off(gateway, monkeypatch):
    room, answers = gateway.gateway_app.gateway.wire, []
    monkeypatch.setattr(room, "tenant_bytes", 500_000)
    body = json.dumps({"model": BASE, "prompt": "a" * 100_000, "return_token_strs": True}).encode()
    whole = request(body, path="/tokenize")
    held = [connect(gateway, receive_buffer=4096) for _ in range(3)]
    for connection in held:
        connection.sendall(whole)
    until(gateway, lambda: room.held("acme") > 500_000)
    with connect(gateway) as connection:
        connection.sendall(whole)
        read(connection).check(429, "rate_limit_exceeded", "read your answers")
    with connect(gateway) as connection:
        connection.sendall(whole.replace(b"sk-acme", b"sk-globex"))
        answers.append(read(connection))
    until(gateway, lambda: room.total == 0)
    for connection in held:
        connection.close()
    assert json.loads(answers[0].body)["count"] == 100_000


def test_time_in_which_nothing_is_written_does_not_count_against_a_reader():
    time = WritingTime(60.0, 1000.0)
    assert time.pause(100.0, 5000) == 65.0
    time.resume(110.0, 1000)
    assert time.pause(5000.0, 2000) == 60.0 + 4.0 - 10.0 + 2.0
    time.resume(5060.0, 1900)
    assert time.pause(6000.0, 0) == 0.0


# --- callers without a key ----------------------------------------------------------------------------------------


@pytest.fixture
async def gateway_app(tmp_path) -> GatewayApp:
    return await build_gateway_app(tmp_path)


async def test_the_openapi_document_is_built_and_encoded_once(gateway_app, monkeypatch):
    built, document = [], app.document
    monkeypatch.setattr(app, "document", lambda operations: built.append(1) or document(operations))
    app._document.cache_clear()
    async with gateway_app.client(None) as client:
        answers = [await client.get("/openapi.json") for _ in range(3)]
    assert built == [1] and len({answer.content for answer in answers}) == 1
    assert answers[0].headers["content-type"] == "application/json"


async def test_readiness_asks_redis_once_for_many_callers(gateway_app, monkeypatch):
    pings = []

    async def trouble() -> str:
        pings.append(1)
        await asyncio.sleep(0.01)
        return ""

    monkeypatch.setattr(gateway_app.limiter, "trouble", trouble)
    gateway_app.open_again()
    async with gateway_app.client(None) as client:
        answers = await asyncio.gather(*(client.get("/ready") for _ in range(50)))
    assert {answer.status_code for answer in answers} == {200} and pings == [1]


async def test_readiness_shows_a_warning_of_the_store_and_stays(gateway_app, monkeypatch):
    async def warning() -> str:
        return "it may evict"

    monkeypatch.setattr(gateway_app.limiter, "warning", warning)
    async with gateway_app.client(None) as client:
        answer = await client.get("/ready")
    found = answer.json()
    assert (answer.status_code, found["status"], found["redis"]) == (200, "ready", True)
    assert found["reason"] == "Redis: it may evict"


async def test_metrics_for_strangers_are_rendered_once_for_many_callers(gateway_app, monkeypatch):
    rendered, render = [], gateway_app.metrics.render
    monkeypatch.setattr(
        gateway_app.metrics, "render", lambda *args, **options: rendered.append(1) or render(*args, **options)
    )
    gateway_app.open_again(open_metrics=True)
    async with gateway_app.client(None) as client:
        answers = await asyncio.gather(*(client.get("/metrics") for _ in range(20)))
    assert {answer.status_code for answer in answers} == {200} and rendered == [1]


async def test_bodies_for_administration_are_short(gateway_app):
    body = {"name": "x", "source": "s" * (MAX_CONTROL_BYTES + 1)}
    async with gateway_app.client("sk-admin") as client:
        answer = await client.post("/admin/v1/adapters", json=body)
    assert answer.status_code == 413
