"""Streams of background responses: read at once, left and continued at any gateway, with OpenAI's client and Valkey."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import openai
import pytest
from fakes import BASE, GatewayApp, build_gateway_app
from redis.asyncio import Redis

from gateway.core.errors import ApiError, Fault
from gateway.responses import background, events
from gateway.responses.record import ResponseEntry
from gateway.responses.service import Responses
from gateway.responses.store import MAX_EVENTS, ResponseStore, StoreLimits
from gateway.serve.listeners import http_port

HELLO = "Hello, world!"
FIELDS = {"model": BASE, "input": "hi", "background": True, "stream": True}
UNKNOWN = f"resp_{'0' * 32}"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(background, "RENEW_SECONDS", 0.02)
    monkeypatch.setattr(background, "EVENT_SECONDS", 0.0)
    monkeypatch.setattr(events, "POLL_SECONDS", 0.005)
    monkeypatch.setattr(events, "MAX_POLL_SECONDS", 0.01)


async def build(valkey: Redis, tmp_path, **limits: Any) -> GatewayApp:
    return await build_gateway_app(tmp_path, responses=Responses(ResponseStore(valkey, StoreLimits(**limits))))


@pytest.fixture
async def gateway_app(valkey, tmp_path) -> AsyncIterator[GatewayApp]:
    gateway_app = await build(valkey, tmp_path)
    yield gateway_app
    await drained(gateway_app)


async def drained(gateway_app: GatewayApp) -> None:
    """Every request has ended once, and no task is left."""
    await until(none_runs)
    await gateway_app.assert_empty()


async def none_runs() -> bool:
    return not [task for task in asyncio.all_tasks() if task.get_name().startswith("background-")]


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await condition():
            await asyncio.sleep(0.005)


async def stream(gateway_app: GatewayApp, **fields: Any) -> list[Any]:
    """Create a response and return its events."""
    async with gateway_app.openai() as client:
        return [event async for event in await client.responses.create(**FIELDS | fields)]


async def follow(gateway_app: GatewayApp, response_id: str, **given: Any) -> list[Any]:
    async with gateway_app.openai() as client:
        return [event async for event in await client.responses.retrieve(response_id, stream=True, **given)]


async def ask(gateway_app: GatewayApp, path: str, key: str = "sk-acme") -> tuple[int, Any]:
    async with gateway_app.client(key) as client:
        answer = await client.get(f"/v1/responses/{path}")
    return answer.status_code, answer.json()["error"]


async def begin(gateway_app: GatewayApp, valkey: Redis) -> tuple[str, asyncio.Task[list[Any]]]:
    """Begin a response that waits after its first token; return its id, and the task of a client that reads it."""
    gateway_app.engine.go_on = asyncio.Event()
    reading = asyncio.create_task(stream(gateway_app))
    found: list[str] = []

    async def runs() -> bool:
        found[:] = [key.decode().rpartition(":")[2] for key in await valkey.keys("loralane:response:*:resp_????????*")]
        found[:] = [name for name in found if name != "events"]
        return bool(found) and (await ResponseStore(valkey).events("acme", found[0], 0)).number > 4

    await until(runs)
    return found[0], reading


def numbers(found: list[Any]) -> list[int]:
    return [event.sequence_number for event in found]


async def test_a_stream_is_that_of_other_responses_but_for_its_beginning(gateway_app):
    async with gateway_app.openai() as client:
        plain = [event.type async for event in await client.responses.create(**FIELDS | {"background": False})]
    found = await stream(gateway_app, metadata={"a": "b"}, service_tier="flex")
    created, queued, *rest = [event.type for event in found]
    assert (created, queued, rest) == ("response.created", "response.queued", plain[1:])
    assert numbers(found) == list(range(len(found)))
    assert [event.response.status for event in found[:3]] == ["queued", "queued", "in_progress"]
    last = found[-1].response
    assert (last.status, last.output_text, last.background, last.metadata) == ("completed", HELLO, True, {"a": "b"})
    assert list(gateway_app.limiter.ends.values())[1:] == [[last.usage.total_tokens]]
    async with gateway_app.openai() as client:
        assert (await client.responses.retrieve(last.id)).to_dict() == last.to_dict()


async def test_it_is_read_again_from_any_event_on(gateway_app, valkey, tmp_path):
    found = await stream(gateway_app)
    response_id, total = found[-1].response.id, len(found)
    assert [event.to_dict() for event in await follow(gateway_app, response_id)] == [each.to_dict() for each in found]
    other = await build(valkey, tmp_path)
    for after in (0, 2, total - 2, total - 1, total, 10**8):
        assert numbers(await follow(other, response_id, starting_after=after)) == list(range(after + 1, total))


async def test_a_client_that_leaves_continues_at_another_gateway(gateway_app, valkey, tmp_path):
    """The response runs on meanwhile, and its events come as they are made."""
    gateway_app.engine.go_on = asyncio.Event()
    other = await build(valkey, tmp_path)
    async with http_port(gateway_app.app, "127.0.0.1", 0) as port, http_port(other.app, "127.0.0.1", 0) as second:
        client = openai.AsyncOpenAI(api_key="sk-acme", base_url=f"http://127.0.0.1:{port}/v1", max_retries=0)
        async with client, await client.responses.create(**FIELDS) as reading:
            seen = [event async for event in _until_delta(reading)]
        assert (seen[-1].delta, gateway_app.engine.open) == ("H", 1)
        client = openai.AsyncOpenAI(api_key="sk-acme", base_url=f"http://127.0.0.1:{second}/v1", max_retries=0)
        again = {"stream": True, "starting_after": seen[-2].sequence_number}
        async with client, await client.responses.retrieve(seen[0].response.id, **again) as reading:
            assert (await anext(reading)).to_dict() == seen[-1].to_dict()
            assert gateway_app.engine.open == 1
            gateway_app.engine.go_on.set()
            rest = [event async for event in reading]
    assert rest[-1].response.output_text == HELLO
    assert numbers(seen + rest) == list(range(len(seen + rest)))


async def _until_delta(reading: Any) -> AsyncIterator[Any]:
    async for event in reading:
        yield event
        if event.type == "response.output_text.delta":
            return


async def test_the_clients_own_streams_work(gateway_app):
    async with gateway_app.openai() as client:
        async with client.responses.stream(model=BASE, input="hi", background=True) as reading:
            made = await reading.get_final_response()
        async with client.responses.stream(response_id=made.id, starting_after=5) as reading:
            found = [event async for event in reading]
            again = await reading.get_final_response()
    assert (again.id, again.output_text, found[0].sequence_number) == (made.id, HELLO, 6)


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_cancelling_ends_every_stream(gateway_app, valkey, tmp_path, elsewhere):
    response_id, reading = await begin(gateway_app, valkey)
    other = await build(valkey, tmp_path) if elsewhere else gateway_app
    following = asyncio.create_task(follow(other, response_id, starting_after=3))
    async with other.openai() as client:
        await client.responses.cancel(response_id)
    for found in (await reading, await following):
        last = found[-1]
        assert (last.type, last.response.status, last.response.error) == ("response.failed", "cancelled", None)
        assert (found[-2].type, last.sequence_number) == ("response.output_text.delta", found[-2].sequence_number + 1)
    await until(none_runs)
    assert list(gateway_app.engine.ends.values()) == ["aborted"]
    [[charged]] = gateway_app.limiter.ends.values()
    assert charged is not None and charged > 0


async def test_an_error_is_the_last_event(gateway_app):
    gateway_app.engine.fail_after = 4
    *_, last = await stream(gateway_app)
    assert (last.type, last.response.error.code) == ("response.failed", "engine_unavailable")
    assert HELLO.startswith(last.response.output_text) and last.response.output[0].status == "incomplete"
    *_, last = await stream(gateway_app, input="x" * 3000)
    assert (last.response.error.code, last.sequence_number) == ("context_length_exceeded", 2)


async def test_a_stream_whose_gateway_died_ends(gateway_app, valkey):
    response_id, reading = await begin(gateway_app, valkey)

    async def lost() -> bool:
        await valkey.hset(f"loralane:response:{{acme}}:{response_id}", "lease", 1)
        return reading.done()

    await until(lost)
    last = (await reading)[-1]
    assert (last.type, last.response.error.code) == ("response.failed", "server_error")


async def test_a_tenant_has_a_bounded_number_of_streams(gateway_app, valkey, monkeypatch):
    """A request that is refused leaves no response behind, and what is no stream is still answered."""
    monkeypatch.setattr(gateway_app.gateway.watches, "most", 1)
    response_id, reading = await begin(gateway_app, valkey)
    async with gateway_app.client() as client:
        path = f"/v1/responses/{response_id}"
        for answer in (await client.get(f"{path}?stream=true"), await client.post("/v1/responses", json=FIELDS)):
            error, wait = answer.json()["error"], answer.headers["retry-after"]
            assert (answer.status_code, error["code"], wait) == (429, "rate_limit_exceeded", "1")
            assert "you have 1 open streams" in error["message"] and "close some" in error["message"]
        assert (await client.get(path)).json()["status"] == "in_progress"
        queued = await client.post("/v1/responses", json=FIELDS | {"stream": False})
        assert queued.json()["status"] == "queued"
    assert len(await valkey.keys("loralane:response:*:resp_????????*")) == 3, "two responses, and events of one"
    gateway_app.engine.go_on.set()
    await reading
    assert (await follow(gateway_app, response_id))[-1].response.output_text == HELLO


async def test_deleting_it_ends_every_stream_and_leaves_nothing(gateway_app, valkey):
    response_id, reading = await begin(gateway_app, valkey)
    async with gateway_app.openai() as client:
        await client.responses.delete(response_id)
    *_, before, last = await reading
    assert (last.type, last.code, last.sequence_number) == ("error", "response_not_found", before.sequence_number + 1)
    await until(none_runs)
    assert await valkey.keys("loralane:response:*") == []
    assert await ResponseStore(valkey).use("acme") == 0


async def test_what_has_no_events_is_not_streamed(gateway_app):
    async with gateway_app.openai() as client:
        stored = await client.responses.create(**FIELDS | {"background": False, "stream": False, "store": True})
        polled = await client.responses.create(**FIELDS | {"stream": False})
    for made in (stored, polled):
        status, error = await ask(gateway_app, f"{made.id}?stream=true")
        assert (status, error["type"], error["param"]) == (400, "invalid_request_error", "stream")
        assert "created with background: true and stream: true" in error["message"]


async def test_a_stream_of_another_tenant_is_as_one_that_does_not_exist(gateway_app):
    made = (await stream(gateway_app))[-1].response.id
    for query in ("?stream=true", "?stream=true&starting_after=3"):
        told = []
        for response_id in (made, UNKNOWN, "resp_x", f"{made}:events"):
            status, error = await ask(gateway_app, response_id + query, "sk-initech")
            told.append((status, str(error).replace(response_id, "ID")))
        assert told == [told[0]] * 4 and told[0][0] == 404


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("stream=yes", "stream"),
        ("starting_after=3", "starting_after"),
        ("stream=false&starting_after=3", "starting_after"),
        ("stream=true&starting_after=-1", "starting_after"),
        ("stream=true&starting_after=1e3", "starting_after"),
        ("stream=true&starting_after=9999999999", "starting_after"),
    ],
)
async def test_what_is_asked_wrongly_is_named(gateway_app, query, param):
    status, error = await ask(gateway_app, f"{UNKNOWN}?{query}")
    assert (status, error["param"]) == (400, param)


async def test_a_stream_waits_for_redis(gateway_app, valkey, monkeypatch):
    _, reading = await begin(gateway_app, valkey)
    run, failures = ResponseStore._do, list(range(20))

    async def away(*args: Any) -> Any:
        if failures:
            failures.pop()
            raise ApiError(Fault.REGISTRY_UNAVAILABLE, "away")
        return await run(*args)

    monkeypatch.setattr(ResponseStore, "_do", away)
    gateway_app.engine.go_on.set()
    found = await reading
    assert (found[-1].response.output_text, failures) == (HELLO, [])
    assert numbers(found) == list(range(len(found)))


async def test_events_are_charged_expire_and_are_refunded(valkey, tmp_path):
    gateway_app = await build(valkey, tmp_path, events_seconds=0.3)
    store = ResponseStore(valkey)
    response_id = (await stream(gateway_app))[-1].response.id
    await drained(gateway_app)
    assert 0 < await valkey.pttl(f"loralane:response:{{acme}}:{response_id}:events") <= 300
    charged = await store.use("acme")
    while (await ask_or_read(gateway_app, response_id)) == 200:
        await asyncio.sleep(0.02)
    assert 512 < await store.use("acme") < charged / 2
    async with gateway_app.openai() as client:
        assert (await client.responses.retrieve(response_id)).output_text == HELLO


async def ask_or_read(gateway_app: GatewayApp, response_id: str) -> int:
    async with gateway_app.client() as client:
        return (await client.get(f"/v1/responses/{response_id}?stream=true")).status_code


async def test_events_yield_to_the_answer(valkey, tmp_path):
    gateway_app = await build(valkey, tmp_path, tenant_bytes=6000)
    response_id = (await stream(gateway_app))[0].response.id
    await drained(gateway_app)
    async with gateway_app.openai() as client:
        assert (await client.responses.retrieve(response_id)).output_text == HELLO
    assert 4000 < await ResponseStore(valkey).use("acme") <= 6000
    status, error = await ask(gateway_app, f"{response_id}?stream=true")
    assert (status, error["param"], error["message"][:8]) == (400, "starting_after", "event 0 ")
    last = (await follow(gateway_app, response_id, starting_after=18))[-1]
    assert last.response.output_text == HELLO


async def test_the_store_keeps_the_newest_events_once(valkey):
    store = ResponseStore(valkey, StoreLimits(events_bytes=30 * MAX_EVENTS))
    entry = ResponseEntry(UNKNOWN, b'{"status": "queued"}', b"[]")
    await store.create("acme", entry, streams=True)
    base = await store.use("acme")
    sent = [b"%010d" % number for number in range(2 * MAX_EVENTS)]
    for start in (0, 0, MAX_EVENTS - 10, MAX_EVENTS):
        assert await store.renew("acme", entry.id, "in_progress", start, sent[start : start + MAX_EVENTS])
    with pytest.raises(ApiError, match="event 0 is not kept"):
        await store.events("acme", entry.id, 0)
    first = len(sent) - 30 * MAX_EVENTS // 26
    page = await store.events("acme", entry.id, first)
    assert (list(page.events), page.number, page.ended) == (sent[first : first + MAX_EVENTS], len(sent), None)
    assert await store.use("acme") == base + 26 * (len(sent) - first)
    assert await store.renew("acme", entry.id, "in_progress", len(sent), [b"x" * 40 * MAX_EVENTS, b"y"])
    page = await store.events("acme", entry.id, len(sent) + 2)
    assert (list(page.events), page.number, await store.use("acme")) == ([], len(sent) + 2, base)
    await store.cancel("acme", entry.id)
    assert not await store.renew("acme", entry.id, "in_progress", len(sent) + 2, [b"z"])
    assert (await store.events("acme", entry.id, len(sent) + 2)).ended["status"] == "cancelled"


async def test_events_that_redis_has_lost_leave_the_numbers_of_later_ones_right(valkey):
    store = ResponseStore(valkey)
    entry = ResponseEntry(UNKNOWN, b'{"status": "queued"}', b"[]")
    await store.create("acme", entry, streams=True)
    base = await store.use("acme")
    await store.renew("acme", entry.id, "in_progress", 0, [b"0", b"1", b"2"])
    await valkey.rpop(f"loralane:response:{{acme}}:{entry.id}:events", 1)
    await store.renew("acme", entry.id, "in_progress", 3, [b"3", b"4"])
    with pytest.raises(ApiError, match="event 2 is not kept"):
        await store.events("acme", entry.id, 2)
    page = await store.events("acme", entry.id, 3)
    assert (list(page.events), page.number) == ([b"3", b"4"], 5)
    assert await store.use("acme") == base + 2 * (1 + 16)
