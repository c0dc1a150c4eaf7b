"""Files over HTTP: as OpenAI's client brings and reads them, and as others try to hurt us with them."""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import multiprocessing
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import files_worker
import httpx
import pytest
from fakes import GatewayApp, build_gateway_app
from file_fakes import LIMITS, MIB, FullFolder, build_files, objects, until
from openai import APIStatusError, BadRequestError, ConflictError, NotFoundError, OpenAI, RateLimitError
from redis import Redis as BlockingRedis
from redis.asyncio import Redis
from served import Served, served

from gateway.files.service import Files
from gateway.files.sweeper import NameAgeTracker, Sweeper
from gateway.http.guard import GuardedProtocol

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.gateway.conftest", "files_worker"])
BIG = 200 * MIB
HOUR = 3600


class Hasty(GuardedProtocol):
    body_seconds = write_seconds = 0.4
    min_rate = 2**40


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "stored"


@pytest.fixture
def server(valkey_server, tmp_path, folder) -> Iterator[Served]:
    BlockingRedis.from_url(valkey_server.connection_url).flushall()
    redis = Redis.from_url(valkey_server.connection_url)
    with served(tmp_path, files=build_files(redis, folder), max_body_bytes=1000, send_buffer=4096) as running:
        yield running
        running.run(running.gateway_app.assert_empty())
        running.run(redis.aclose())


@pytest.fixture
async def gateway_app(valkey, tmp_path, folder) -> GatewayApp:
    return await build_gateway_app(tmp_path, files=build_files(valkey, folder))


def openai(server: Served, key: str = "sk-acme") -> OpenAI:
    return OpenAI(api_key=key, base_url=f"{server.url}/v1", max_retries=0)


def lines(count: int) -> bytes:
    return b"".join(b'{"custom_id": "%d"}\n' % number for number in range(count))


def test_the_official_client_brings_lists_reads_and_deletes(server, tmp_path, folder):
    client = openai(server)
    path = tmp_path / "requests.jsonl"
    path.write_bytes(lines(9999))
    brought = client.files.create(
        file=path, purpose="batch", expires_after={"anchor": "created_at", "seconds": 2 * HOUR}
    )
    assert (brought.object, brought.filename, brought.purpose) == ("file", "requests.jsonl", "batch")
    assert (brought.bytes, brought.status) == (path.stat().st_size, "processed")
    assert brought.expires_at == brought.created_at + 2 * HOUR
    assert client.files.wait_for_processing(brought.id) == client.files.retrieve(brought.id) == brought
    assert client.files.content(brought.id).read() == path.read_bytes()
    others = [client.files.create(file=('ü "1".jsonl', b"{}"), purpose="batch") for _ in range(3)]
    assert others[0].filename.startswith("ü ")
    everything = [brought.id, *[file.id for file in others]]
    assert [file.id for file in client.files.list(limit=1, order="asc")] == everything, "page by page"
    assert [file.id for file in client.files.list()] == everything[::-1]
    page = client.files.list(after=everything[0], limit=2, order="asc", purpose="batch")
    assert ([file.id for file in page.data], page.has_more) == (everything[1:3], True)
    assert list(client.files.list(purpose="batch_output")) == []
    deleted = client.files.delete(brought.id)
    assert (deleted.id, deleted.object, deleted.deleted) == (brought.id, "file", True)
    with pytest.raises(NotFoundError) as caught:
        client.files.retrieve(brought.id)
    assert (caught.value.code, caught.value.param) == ("file_not_found", "file_id")
    assert len(objects(folder)) == 3


def test_others_files_are_as_those_that_are_not_there(server):
    file = openai(server).files.create(file=b"secret", purpose="batch")
    for client in (openai(server, "sk-globex"), openai(server, "sk-initech")):
        assert list(client.files.list()) == []
        for work in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(NotFoundError) as caught:
                work(file.id)
            assert caught.value.code == "file_not_found"
    for key, status in (("sk-admin", 403), ("sk-unknown", 401)):
        for work in (lambda c: c.files.list(), lambda c: c.files.content(file.id), lambda c: c.files.delete(file.id)):
            with pytest.raises(APIStatusError) as caught:
                work(openai(server, key))
            assert caught.value.status_code == status
    assert openai(server).files.content(file.id).read() == b"secret"


def test_refusals_reach_the_official_client(server, folder):
    client = openai(server)
    with pytest.raises(BadRequestError, match="purpose"):
        client.files.create(file=b"x", purpose="fine-tune")
    with pytest.raises(BadRequestError, match="empty"):
        client.files.create(file=b"", purpose="batch")
    with pytest.raises(BadRequestError) as caught:
        client.files.create(file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 60})
    assert caught.value.param == "expires_after[seconds]"
    for size in (LIMITS.max_file_bytes + 1, LIMITS.max_file_bytes + 2 * MIB):
        with pytest.raises(APIStatusError) as caught:
            client.files.create(file=io.BytesIO(b"x" * size), purpose="batch")
        assert (caught.value.status_code, caught.value.code) == (413, "request_too_large")
    for _ in range(2):
        client.files.create(file=b"x" * LIMITS.max_file_bytes, purpose="batch")
    with pytest.raises(RateLimitError) as caught:
        client.files.create(file=b"x" * LIMITS.max_file_bytes, purpose="batch")
    assert caught.value.code == "insufficient_quota"
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert len(objects(folder)) == 2


def test_a_file_that_a_batch_needs_is_not_deleted(server):
    client = openai(server)
    file = client.files.create(file=b"{}", purpose="batch")
    files = files_of(server)
    server.run(files.pin("acme", file.id, "batch_1"))
    with pytest.raises(ConflictError) as caught:
        client.files.delete(file.id)
    assert caught.value.code == "file_in_use"
    server.run(files.unpin("acme", file.id, "batch_1"))
    client.files.delete(file.id)


def files_of(server: Served) -> Files:
    return next(
        route.endpoint.__self__._files for route in server.gateway_app.app.router.routes if route.path == "/v1/files"
    )


BOUNDARY = "----of-our-own"
PURPOSE = ("purpose", None, b"batch")
THE_FILE = ("file", "a.jsonl", b"{}\n")


def form(*parts: tuple[str, str | None, bytes], end: bytes = b"--\r\n") -> bytes:
    body = b""
    for name, filename, data in parts:
        named = f'; filename="{filename}"' if filename is not None else ""
        head = f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="{name}"{named}\r\n\r\n'
        body += head.encode() + data + b"\r\n"
    return body + f"--{BOUNDARY}".encode() + end


async def post(gateway_app: GatewayApp, body: bytes | Any, content_type: str = "", **headers: str) -> httpx.Response:
    kind = content_type or f"multipart/form-data; boundary={BOUNDARY}"
    async with gateway_app.client() as client:
        return await client.post("/v1/files", content=body, headers={"content-type": kind, **headers})


@pytest.mark.parametrize("parts", [(PURPOSE, THE_FILE), (THE_FILE, PURPOSE), (("else", None, b"1"), THE_FILE, PURPOSE)])
async def test_fields_come_in_any_order(gateway_app, parts):
    answer = await post(gateway_app, form(*parts))
    assert (answer.status_code, answer.json()["filename"], answer.json()["bytes"]) == (200, "a.jsonl", 3)


@pytest.mark.parametrize("step", [1, 2, 7, 61])
async def test_a_form_may_come_in_any_pieces(gateway_app, step):
    data = f"\r\n--{BOUNDARY[:-1]}\r\n-\r--{BOUNDARY}x".encode()
    body = form(PURPOSE, ("file", "b", data), ("expires_after[anchor]", None, b"created_at"),
                ("expires_after[seconds]", None, b"7200"))  # fmt: skip

    async def dribble():
        for start in range(0, len(body), step):
            yield body[start : start + step]

    answer = (await post(gateway_app, dribble())).json()
    assert (answer["bytes"], answer["expires_at"] - answer["created_at"]) == (len(data), 7200)
    async with gateway_app.client() as client:
        read = await client.get(f"/v1/files/{answer['id']}/content")
    assert (read.content, int(read.headers["content-length"])) == (data, len(data))


REFUSED = {
    "no form": (b"{}", "application/json", "multipart"),
    "no boundary": (form(PURPOSE, THE_FILE), "multipart/form-data", "boundary"),
    "a long boundary": (b"", "multipart/form-data; boundary=" + "x" * 5000, "valid"),
    "another boundary": (form(PURPOSE, THE_FILE), "multipart/form-data; boundary=other", "valid"),
    "nothing": (b"", "", "ends"),
    "no end": (form(PURPOSE, THE_FILE, end=b""), "", "ends"),
    "no parts": (f"--{BOUNDARY}--\r\n".encode(), "", "file is required"),
    "no file": (form(PURPOSE), "", "file is required"),
    "no purpose": (form(THE_FILE), "", "purpose"),
    "another purpose": (form(THE_FILE, ("purpose", None, b"assistants")), "", "purpose"),
    "two files": (form(PURPOSE, THE_FILE, THE_FILE), "", "one file"),
    "an empty file": (form(PURPOSE, ("file", "a", b"")), "", "empty"),
    "a long name": (form(PURPOSE, ("file", "a" * 513, b"x")), "", "filename"),
    "many parts": (form(*[(f"p{number}", None, b"x") for number in range(17)]), "", "parts"),
    "a large field": (form(PURPOSE, ("p", None, b"x" * 1025)), "", "1024"),
    "a long header": (form(("file", "a" * 5000, b"x")), "", "header"),
    "many headers": (
        form(PURPOSE, THE_FILE).replace(b"\r\n\r\n", b"\r\nx: y" * 9 + b"\r\n\r\n", 1), "", "header"
    ),
    "an anchor alone": (form(THE_FILE, PURPOSE, ("expires_after[anchor]", None, b"created_at")), "", "number"),
    "seconds alone": (form(THE_FILE, PURPOSE, ("expires_after[seconds]", None, b"7200")), "", "anchor"),
    "another anchor": (
        form(THE_FILE, PURPOSE, ("expires_after[anchor]", None, b"now"), ("expires_after[seconds]", None, b"7200")),
        "",
        "anchor",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
async def test_forms_that_are_none(gateway_app, folder, valkey, name):
    body, content_type, words = REFUSED[name]
    answer = await post(gateway_app, body, content_type)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert words in answer.json()["error"]["message"]
    assert objects(folder) == []
    assert await valkey.hgetall("loralane:file-use:{acme}") in ({}, {b"bytes": b"0", b"files": b"0"})


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=10001", "limit=x", "limit=%C2%B2", "order=up", "after=file-0", "limit=" + "9" * 5000]
)
async def test_lists_that_are_none(gateway_app, query):
    async with gateway_app.client() as client:
        answer = await client.get(f"/v1/files?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.partition("=")[0])


async def test_a_purpose_that_is_wrong_is_refused_before_the_file_has_come(gateway_app):
    sent = 0

    async def body():
        nonlocal sent
        yield form(("purpose", None, b"vision"), end=b"\r\n")
        for _ in range(3):
            sent += 1
            yield b"x" * MIB

    answer = await post(gateway_app, body())
    assert (answer.status_code, answer.json()["error"]["param"], sent) == (400, "purpose", 0)


async def test_what_is_too_large_is_refused_while_it_comes(gateway_app, folder):
    sent = 0

    async def body():
        nonlocal sent
        yield form(PURPOSE, end=b"\r\ncontent-disposition: form-data; name=file; filename=a\r\n\r\n")
        while sent < 100:
            sent += 1
            yield b"x" * MIB

    answer = await post(gateway_app, body())
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
    assert sent <= LIMITS.max_file_bytes // MIB + 1
    assert objects(folder) == []
    answer = await post(gateway_app, form(PURPOSE, THE_FILE), **{"content-length": str(LIMITS.max_file_bytes + 2**17)})
    assert answer.status_code == 413


async def test_a_full_disk_is_503(valkey, tmp_path, folder):
    gateway_app = await build_gateway_app(tmp_path, files=build_files(valkey, FullFolder(folder)))
    answer = await post(gateway_app, form(PURPOSE, THE_FILE))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "storage_unavailable")
    assert answer.headers["x-should-retry"] == "true"
    assert objects(folder) == []


async def test_a_redis_that_is_away_is_503(tmp_path, folder):
    away = Redis.from_url(f"unix://{tmp_path}/absent")
    gateway_app = await build_gateway_app(tmp_path, files=build_files(away, folder))
    answer = await post(gateway_app, form(PURPOSE, THE_FILE))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "registry_unavailable")
    assert objects(folder) == []


async def test_names_cannot_break_out_of_a_header(gateway_app):
    answer = await post(gateway_app, form(PURPOSE, ("file", "ä'; x=\\\\y/../z", b"{}")))
    assert "ä" in answer.json()["filename"]
    async with gateway_app.client() as client:
        read = await client.get(f"/v1/files/{answer.json()['id']}/content")
        head = await client.head(f"/v1/files/{answer.json()['id']}/content")
    name = read.headers["content-disposition"].removeprefix("attachment; filename*=UTF-8''")
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEF0123456789%.")
    assert (head.status_code, head.headers["content-length"]) == (200, "2")
    assert read.headers["x-content-type-options"] == "nosniff"


def upload_head(length: int) -> bytes:
    return (
        f"POST /v1/files HTTP/1.1\r\nhost: here\r\nauthorization: Bearer sk-acme\r\ncontent-length: {length}\r\n"
        f"content-type: multipart/form-data; boundary={BOUNDARY}\r\n\r\n"
    ).encode()


def connect(url: str) -> socket.socket:
    host, _, port = url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def test_a_client_that_hangs_up_leaves_nothing(server, folder):
    files = files_of(server)
    body = form(PURPOSE, ("file", "a", b"x" * 3 * MIB))
    with connect(server.url) as connection:
        connection.sendall(upload_head(len(body)) + body[: 2 * MIB])
        server.run(settled(files, lambda use: use.bytes > 0))
    server.run(settled(files, lambda use: use.files == 0))
    assert (server.run(files.use("acme")).bytes, objects(folder)) == (0, [])


async def settled(files: Files, enough) -> None:
    while not enough(await files.use("acme")):
        await asyncio.sleep(0.01)


def test_deadlines_are_for_those_who_do_not_send(valkey_server, tmp_path, folder):
    """A storage that is slow is no client that is."""
    redis = Redis.from_url(valkey_server.connection_url)
    files = build_files(redis, folder)
    with served(tmp_path, protocol=Hasty, files=files) as server:
        slow = threading.Event()
        create = files.storage._place.create

        def slowly(name: str):
            slow.wait(0.6)  # longer than a client may take
            return create(name)

        files.storage._place.create = slowly
        data = b"x" * 3 * MIB
        assert openai(server).files.create(file=data, purpose="batch").bytes == len(data)
        with connect(server.url) as connection:
            connection.sendall(upload_head(4 * MIB) + form(PURPOSE, end=b"\r\n"))
            response = http.client.HTTPResponse(connection)
            response.begin()
            assert (response.status, json.loads(response.read())["error"]["message"]) == (
                400, "the request did not arrive in time",
            )  # fmt: skip


def test_who_stops_reading_stops_the_reading(server, folder, monkeypatch):
    file = openai(server).files.create(file=b"x" * 4 * MIB, purpose="batch")
    files, pieces = files_of(server), []
    read, closed = files.storage.read, threading.Event()

    async def counted(*args):
        try:
            async for piece in read(*args):
                pieces.append(piece)
                yield piece
        finally:
            closed.set()

    monkeypatch.setattr(files.storage, "read", counted)
    with connect(server.url) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        path = f"/v1/files/{file.id}/content"
        connection.sendall(f"GET {path} HTTP/1.1\r\nhost: here\r\nauthorization: Bearer sk-acme\r\n\r\n".encode())
        assert connection.recv(1)
        server.run(until(lambda: len(pieces) > 0))
        server.run(asyncio.sleep(0.2))
        assert sum(map(len, pieces)) < 4 * MIB, "the rest waits for its reader"
    assert closed.wait(60)


def peak(pid: int) -> int:
    """Bytes resident at most, since the process began or `forget_peak`."""
    text = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(next(line.split()[1] for line in text.splitlines() if line.startswith("VmHWM")))


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def bring(url: str, size: int) -> str:
    """A file that is made while it is sent."""
    head = form(PURPOSE, end=b"\r\ncontent-disposition: form-data; name=file; filename=a\r\n\r\n")
    tail = f"\r\n--{BOUNDARY}--\r\n".encode()

    def body() -> Iterator[bytes]:
        yield head
        for _ in range(size // MIB):
            yield b"x" * MIB
        yield tail

    headers = {
        "authorization": "Bearer sk-acme",
        "content-type": f"multipart/form-data; boundary={BOUNDARY}",
        "content-length": str(len(head) + size + len(tail)),
    }
    answer = httpx.post(f"{url}/v1/files", content=body(), headers=headers, timeout=60)
    assert (answer.status_code, answer.json()["bytes"]) == (200, size)
    return answer.json()["id"]


def fetch(url: str, file_id: str) -> int:
    headers = {"authorization": "Bearer sk-acme"}
    with httpx.stream("GET", f"{url}/v1/files/{file_id}/content", headers=headers, timeout=60) as answer:
        return sum(len(piece) for piece in answer.iter_raw())


@contextmanager
def worker(redis: str, folder: Path, lease_seconds: float = 60.0) -> Iterator[tuple[BaseProcess, str]]:
    """A gateway process and its URL."""
    BlockingRedis.from_url(redis).flushall()
    ours, theirs = FORKS.Pipe()
    process = FORKS.Process(target=files_worker.run, args=(redis, folder, theirs, lease_seconds), daemon=True)
    process.start()
    try:
        yield process, f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.kill()
        process.join()


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks of memory are Linux's to tell")
def test_two_hundred_megabytes_pass_through_a_few(valkey_server, tmp_path):
    with worker(valkey_server.connection_url, tmp_path) as (process, url):
        fetch(url, bring(url, 8 * MIB))
        forget_peak(process.pid)
        idle = peak(process.pid)
        file_id = bring(url, BIG)
        brought = peak(process.pid) - idle
        assert fetch(url, file_id) == BIG
        fetched = peak(process.pid) - idle
    assert max(brought, fetched) < 16 * MIB, f"{brought / MIB:.1f} and {fetched / MIB:.1f} MiB"


async def test_a_killed_gateway_leaves_nothing_for_long(valkey_server, valkey, tmp_path):
    body = form(PURPOSE, ("file", "a", b"x" * 3 * MIB))
    with worker(valkey_server.connection_url, tmp_path, lease_seconds=2.0) as (process, url):
        files = build_files(valkey, tmp_path / "stored", lease_seconds=2.0)
        await asyncio.to_thread(bring, url, MIB)
        kept = (await files.list("acme")).data
        with connect(url) as connection:
            connection.sendall(upload_head(len(body)) + body[: 2 * MIB])
            await until(lambda: len(objects(tmp_path / "stored")) == 2)
            process.kill()
            process.join()
    await settled(files, lambda use: use.files == 1)
    assert (await files.use("acme")).bytes == MIB
    [swept] = await Sweeper(files.storage, files.registry, NameAgeTracker(0), NameAgeTracker(0)).sweep()
    assert swept.startswith("partial/")
    assert objects(tmp_path / "stored") == [kept[0].object_name]


class Impatient(GuardedProtocol):
    max_unread_bytes = MIB


def test_who_is_refused_may_send_the_rest_and_ask_again(valkey_server, tmp_path, folder):
    """Where an answer ends its connection, who is still sending may never read it."""
    BlockingRedis.from_url(valkey_server.connection_url).flushall()
    files = build_files(Redis.from_url(valkey_server.connection_url), folder)
    head = upload_head(0).replace(b"content-length: 0", b"transfer-encoding: chunked")
    with served(tmp_path, protocol=Impatient, files=files) as server, connect(server.url) as connection:
        connection.sendall(head + chunk(form(PURPOSE, ("file", "a", b"x" * (LIMITS.max_file_bytes + 2**17)))))
        assert status_of(connection) == 413
        connection.sendall(chunk(b"x" * (MIB // 2)) + chunk(b"") + b"GET /version HTTP/1.1\r\nhost: here\r\n\r\n")
        assert status_of(connection) == 200


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def status_of(connection: socket.socket) -> int:
    """Read the next response of the connection and return its status."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    response.read()
    return response.status
