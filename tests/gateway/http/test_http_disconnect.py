"""Clients that leave, over real sockets."""

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import httpx
import pytest
import uvicorn
from fakes import BASE, GatewayApp, build_gateway_app

from gateway.http.server import guarded_config

CHAT = {"model": BASE, "messages": [{"role": "user", "content": "hi"}]}
PATH, MESSAGES = "/v1/chat/completions", "/v1/messages"


@asynccontextmanager
async def served(gateway_app: GatewayApp) -> AsyncIterator[httpx.AsyncClient]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(guarded_config(gateway_app.app, lifespan="off", timeout_graceful_shutdown=1))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    headers = {"authorization": "Bearer sk-acme"}
    try:
        async with httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=60) as client:
            yield client
    finally:
        server.should_exit = True
        await task


@pytest.fixture
async def gateway_app(tmp_path) -> GatewayApp:
    return await build_gateway_app(tmp_path)


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def leave(task: asyncio.Task) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def read_stream(client, body) -> str:
    async with client.stream("POST", PATH, json={**body, "stream": True}) as response:
        return "".join([text async for text in response.aiter_text()])


async def test_a_stream_arrives_piece_by_piece(gateway_app):
    gateway_app.engine.go_on = asyncio.Event()
    async with served(gateway_app) as client, client.stream("POST", PATH, json={**CHAT, "stream": True}) as response:
        lines = response.aiter_lines()
        text = ""
        while '"content":"H"' not in text:
            text += await anext(lines)
        assert gateway_app.engine.open == 1
        gateway_app.engine.go_on.set()
        rest = "".join([line async for line in lines])
        assert rest.endswith("data: [DONE]")
    await gateway_app.assert_empty()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
    ],
)
async def test_leaving_aborts_every_vector(gateway_app, path, body):
    gateway_app.engine.admit = asyncio.Event()
    async with served(gateway_app) as client:
        task = asyncio.create_task(client.post(path, json={"model": BASE, **body}))
        await until(lambda: len(gateway_app.engine.requests) == 2)
        await leave(task)
        await until(lambda: gateway_app.engine.open == 0)
        await until(lambda: gateway_app.watcher.records)
    record = gateway_app.watcher.records[0]
    assert (record.outcome.finish, record.outcome.status, record.work.completion_tokens) == ("cancelled", 499, 0)
    assert list(gateway_app.limiter.ends.values()) == [[record.work.prompt_tokens]]
    await gateway_app.assert_empty()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("where", ["admit", "go_on"])
@pytest.mark.parametrize("path", [PATH, MESSAGES])
async def test_leaving_aborts_at_once(gateway_app, stream, where, path):
    setattr(gateway_app.engine, where, asyncio.Event())  # never set: only an abort can end the engine's work
    async with served(gateway_app) as client:
        task = asyncio.create_task(client.post(path, json={**CHAT, "max_tokens": 40, "stream": stream}))
        await until(lambda: gateway_app.engine.requests)
        await until(lambda: gateway_app.engine.generated.total() == (where == "go_on"))
        await asyncio.sleep(0.02)
        await leave(task)
        await until(lambda: gateway_app.engine.open == 0)
        await until(lambda: gateway_app.watcher.records)
    record = gateway_app.watcher.records[0]
    assert (record.outcome.finish, record.outcome.status) == ("cancelled", 499)
    assert record.work.completion_tokens == (where == "go_on")
    assert list(gateway_app.limiter.ends.values()) == [[record.work.prompt_tokens + record.work.completion_tokens]]
    await gateway_app.assert_empty()


async def test_a_client_that_stops_reading_is_not_waited_for(gateway_app):
    """A slow reader holds nothing back in the engine; when it leaves, all is settled."""
    gateway_app.engine.reply = lambda sent: "x" * 200
    async with served(gateway_app) as client:
        async with client.stream("POST", PATH, json={**CHAT, "stream": True}):
            await until(lambda: gateway_app.engine.requests and gateway_app.engine.open == 0)
        await until(lambda: gateway_app.gateway.active == 0)
    await gateway_app.assert_empty()


@pytest.mark.slow
async def test_two_hundred_random_departures_leave_nothing_running(gateway_app):
    rng = random.Random(11)
    gateway_app.engine.pause, gateway_app.limiter.delay = 0.003, 0.002
    finished = 0

    async def visit(client, number: int) -> None:
        nonlocal finished
        body = {**CHAT, "n": rng.choice([1, 1, 2]), "model": rng.choice([BASE, "pirate", "poet"])}
        work = read_stream(client, body) if number % 2 else client.post(PATH, json=body)
        task = asyncio.create_task(work)
        await asyncio.sleep(rng.uniform(0, 1.5))
        finished += task.done()
        await leave(task)

    async with served(gateway_app) as client:
        for start in range(0, 200, 50):
            await asyncio.gather(*[visit(client, number) for number in range(start, start + 50)])
        await until(lambda: gateway_app.gateway.active == 0)
    await gateway_app.assert_empty()
    finishes = {record.outcome.finish for record in gateway_app.watcher.records}
    assert finishes == {"cancelled", "stop"}
    assert 0 < finished < 200


async def test_an_endless_body_is_not_read_to_its_end(gateway_app):
    sent = 0

    async def endless():
        nonlocal sent
        while sent < 2**30:
            sent += 65536
            yield b" " * 65536

    async with served(gateway_app) as client:
        with suppress(httpx.TransportError):  # where the server had answered and gone before the client looked
            assert (await client.post(PATH, content=endless())).status_code == 413
        assert sent < 2**28
        assert (await client.get("/health")).status_code == 200
