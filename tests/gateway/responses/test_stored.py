"""Stored responses, and conversations that continue them, with OpenAI's own client and a real Valkey."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from fakes import BASE, GatewayApp, build_gateway_app, tiny_tokenizer
from redis.asyncio import Redis

from gateway.core.errors import ApiError, Fault
from gateway.core.space import Disk
from gateway.redis.connect import connect_cluster
from gateway.responses.record import ResponseEntry
from gateway.responses.service import Responses
from gateway.responses.store import ResponseStore, StoreLimits

LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}
CALL = '<tool_call>{"name": "look", "arguments": {"place": "sea"}}</tool_call>'
UNKNOWN = f"resp_{'0' * 32}"


async def build(valkey: Redis, tmp_path, storing: Any = "on_request", **limits: Any) -> GatewayApp:
    responses = Responses(ResponseStore(valkey, StoreLimits(**limits)), storing)
    gateway_app = await build_gateway_app(tmp_path, responses=responses)
    gateway_app.responses = responses
    gateway_app.engine.info.max_model_len = 2048
    return gateway_app


@pytest.fixture
async def gateway_app(valkey, tmp_path) -> GatewayApp:
    return await build(valkey, tmp_path)


async def create(gateway_app: GatewayApp, **fields: Any) -> Any:
    async with gateway_app.openai() as client:
        return await client.responses.create(**{"model": BASE, "input": "hi", "store": True} | fields)


async def ask(gateway_app: GatewayApp, method: str, path: str, key: str = "sk-acme", **fields: Any) -> tuple[int, Any]:
    async with gateway_app.client(key) as client:
        answer = await client.request(method, f"/v1/responses{path}", **({"json": fields} if fields else {}))
    return answer.status_code, answer.json()


def prompt(gateway_app: GatewayApp) -> str:
    return tiny_tokenizer().decode(gateway_app.engine.requests[-1].prompt_ids, skip_special=False)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stored_response_is_there_until_it_is_deleted(gateway_app, valkey, stream):
    async with gateway_app.openai() as client:
        fields = {"model": BASE, "input": "hi", "store": True, "metadata": {"a": "b"}}
        if stream:
            events = [event async for event in await client.responses.create(**fields, stream=True)]
            assert events[0].response.to_dict()["store"] is True
            made = events[-1].response
        else:
            made = await client.responses.create(**fields)
        assert made.to_dict()["store"] is True
        found = await client.responses.retrieve(made.id)
        assert found.to_dict() == made.to_dict()
        assert await client.responses.delete(made.id) is None
        for gone in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
            with pytest.raises(openai.NotFoundError, match="there is no stored response"):
                await gone(made.id)
    assert await valkey.keys("loralane:response:*") == []
    await gateway_app.assert_empty()


async def test_what_is_not_to_be_stored_is_not(gateway_app, valkey):
    for fields in ({"store": False}, {"store": None}):
        made = await create(gateway_app, **fields)
        assert made.to_dict()["store"] is False
        assert (await ask(gateway_app, "GET", f"/{made.id}"))[0] == 404
    assert await valkey.keys("*response*") == []


async def test_the_operator_may_store_by_default_or_never(valkey, tmp_path):
    gateway_app = await build(valkey, tmp_path, "by_default")
    made = await create(gateway_app, store=None)
    assert (await ask(gateway_app, "GET", f"/{made.id}"))[0] == 200
    assert (await create(gateway_app, store=False)).to_dict()["store"] is False
    gateway_app = await build(valkey, tmp_path, "never")
    assert (await create(gateway_app, store=None)).to_dict()["store"] is False
    with pytest.raises(openai.BadRequestError, match="stores no responses"):
        await create(gateway_app)


async def test_anothers_response_is_as_one_that_does_not_exist(gateway_app):
    made = await create(gateway_app)
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
        told = []
        for response_id in (made.id, UNKNOWN, "resp_x"):
            status, body = await ask(gateway_app, method, f"/{response_id}{path}", "sk-initech")
            told.append((status, str(body).replace(response_id, "ID")))
        assert told == [told[0]] * 3 and told[0][0] == 404
    told = []
    for response_id in (made.id, UNKNOWN):
        body = {"model": BASE, "input": "hi", "previous_response_id": response_id}
        status, body = await ask(gateway_app, "POST", "", "sk-initech", **body)
        assert (status, body["error"]["code"]) == (400, "previous_response_not_found")
        told.append(str(body).replace(response_id, "ID"))
    assert told[0] == told[1]
    assert (await ask(gateway_app, "GET", f"/{made.id}"))[0] == 200


async def test_conversations_of_one_tenant_in_memory_have_a_bound(gateway_app, monkeypatch):
    made, engine = await create(gateway_app), gateway_app.engine
    body = {"model": BASE, "input": "hi", "previous_response_id": made.id}
    monkeypatch.setattr(gateway_app.responses._held, "most", 1000)
    engine.go_on = asyncio.Event()
    first = asyncio.create_task(ask(gateway_app, "POST", "", **body))
    while len(engine.requests) < 2:
        await asyncio.sleep(0.001)
    statuses = [(await ask(gateway_app, "POST", "", **body, background=True))[0] for _ in range(6)]
    assert statuses[0] == 200 and statuses[-1] == 429
    engine.go_on.set()
    assert (await first)[0] == 200
    async with asyncio.timeout(10):
        while (await ask(gateway_app, "POST", "", **body))[0] != 200:
            await asyncio.sleep(0.01)


async def test_input_items_have_ids_and_pages(gateway_app):
    items = [
        {"role": "user", "content": "Where?"},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}", "id": "fc_1"},
        {"type": "function_call_output", "call_id": "c", "output": "blue"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Blue.", "annotations": []}]},
        {"role": "user", "content": [{"type": "input_text", "text": "Why?"}]},
    ]
    made = await create(gateway_app, input=items)
    async with gateway_app.openai() as client:
        everything = [item async for item in client.responses.input_items.list(made.id, order="asc", limit=2)]
        assert [item.type for item in everything] == [
            "message",
            "function_call",
            "function_call_output",
            "message",
            "message",
        ]
        assert everything[0].content[0].to_dict() == {"type": "input_text", "text": "Where?"}
        assert len({item.id for item in everything}) == 5
        newest = [item async for item in client.responses.input_items.list(made.id, limit=3)]
        assert [item.id for item in newest] == [item.id for item in reversed(everything)]
        page = await client.responses.input_items.list(made.id, after=everything[1].id, order="asc", limit=2)
        assert ([item.id for item in page.data], page.has_more) == ([item.id for item in everything[2:4]], True)
    for query in ("after=x", "limit=0", "limit=101", "order=x", "before=x"):
        status, body = await ask(gateway_app, "GET", f"/{made.id}/input_items?{query}")
        assert (status, body["error"]["param"]) == (400, query.partition("=")[0])


async def test_a_conversation_is_continued_without_its_instructions(gateway_app):
    gateway_app.engine.reply = lambda sent: CALL
    first = await create(gateway_app, input="Where?", instructions="Be a pirate.", tools=[LOOK])
    gateway_app.engine.reply = lambda sent: "There."
    output = [{"type": "function_call_output", "call_id": first.output[0].call_id, "output": "blue"}]
    second = await create(gateway_app, input=output, previous_response_id=first.id, instructions="Be brief.")
    assert second.previous_response_id == first.id
    third = await create(gateway_app, input="Sure?", previous_response_id=second.id, store=False)
    call = '{"name": "look", "arguments": {"place": "sea"}}'
    history = f"<|user|>Where?<|end|><|assistant|>{call}<|end|><|tool|>blue<|end|>"
    assert prompt(gateway_app) == f"{history}<|assistant|>There.<|end|><|user|>Sure?<|end|><|assistant|>"
    assert (third.previous_response_id, third.to_dict()["store"]) == (second.id, False)
    items = (await ask(gateway_app, "GET", f"/{second.id}/input_items"))[1]["data"]
    assert [item["type"] for item in items] == ["function_call_output"]


def reference(item: Any) -> dict[str, str]:
    return {"type": "item_reference", "id": item["id"]}


async def test_items_of_stored_responses_are_found_by_their_ids(gateway_app):
    """AI SDK's default provider sends the items of earlier answers so."""
    gateway_app.engine.reply = lambda sent: f"So: {CALL}"
    first = await create(gateway_app, input="Where?", tools=[LOOK])
    text, call = first.to_dict()["output"]
    gateway_app.engine.reply = lambda sent: "There."
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "blue"}
    asked = [{"role": "user", "content": "Where?"}, reference(text), {"id": call["id"]}, output]
    second = await create(gateway_app, input=asked)
    called = '{"name": "look", "arguments": {"place": "sea"}}'
    history = f"<|user|>Where?<|end|><|assistant|>So:{called}<|end|><|tool|>blue<|end|>"
    assert prompt(gateway_app) == f"{history}<|assistant|>"
    items = (await ask(gateway_app, "GET", f"/{second.id}/input_items?order=asc"))[1]["data"]
    assert [item["type"] for item in items] == ["message", "message", "function_call", "function_call_output"]
    assert {item["id"] for item in items}.isdisjoint({text["id"], call["id"]})
    await ask(gateway_app, "DELETE", f"/{first.id}")
    again = [*map(reference, items), reference(second.to_dict()["output"][0]), {"role": "user", "content": "Sure?"}]
    await create(gateway_app, input=again, store=False)
    assert prompt(gateway_app) == f"{history}<|assistant|>There.<|end|><|user|>Sure?<|end|><|assistant|>"


async def test_items_that_are_not_stored_are_named(gateway_app, monkeypatch):
    made, unstored = await create(gateway_app), await create(gateway_app, store=False)
    own, other = made.to_dict()["output"][0]["id"], unstored.to_dict()["output"][0]["id"]
    for item_id in (other, own[:-1] + "1", "msg_1", "", f"msg_{made.id}_in1"):
        status, body = await ask(gateway_app, "POST", "", model=BASE, input=[reference({"id": item_id})])
        assert (status, body["error"]["param"]) == (400, "input[0].id"), item_id
        assert "store: true" in body["error"]["message"]
    body = {"model": BASE, "input": [reference({"id": own})]}
    assert (await ask(gateway_app, "POST", "", "sk-initech", **body))[1]["error"]["param"] == "input[0].id"
    body["input"].insert(0, {"role": "user", "content": "hi"})
    assert (await ask(gateway_app, "POST", "", **body))[0] == 200
    for name, most in (("store.MOST_HISTORY_BYTES", 9), ("references.MOST_HISTORY_PARTS", 1), ("store.MOST_LISTS", 0)):
        with monkeypatch.context() as bounded:
            bounded.setattr(f"gateway.responses.{name}", most)
            status, answer = await ask(gateway_app, "POST", "", **body)
        assert (status, answer["error"]["param"]) == (400, "input"), name


async def test_one_response_may_be_continued_twice(gateway_app):
    first = await create(gateway_app, input="a")
    for text in ("b", "c"):
        await create(gateway_app, input=text, previous_response_id=first.id)
        assert prompt(gateway_app).endswith(f"<|user|>{text}<|end|><|assistant|>")
        assert prompt(gateway_app).count("<|user|>") == 2


async def test_a_conversation_ends_with_any_of_its_responses(gateway_app):
    first = await create(gateway_app, input="a")
    second = await create(gateway_app, input="b", previous_response_id=first.id)
    await ask(gateway_app, "DELETE", f"/{first.id}")
    for response_id in (first.id, UNKNOWN, second.id):
        with pytest.raises(openai.BadRequestError) as refused:
            await create(gateway_app, previous_response_id=response_id)
        assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")
        assert (first.id if response_id == second.id else response_id) in refused.value.message
    assert len(gateway_app.engine.requests) == 2


async def test_the_length_of_a_conversation_is_bounded(gateway_app, monkeypatch):
    first = await create(gateway_app, input="a")
    second = await create(gateway_app, input="b", previous_response_id=first.id)
    monkeypatch.setattr("gateway.responses.store.MOST_HISTORY_PARTS", 8)
    await create(gateway_app, previous_response_id=second.id)
    for name in ("MOST_HISTORY_PARTS", "MOST_HISTORY_BYTES"):
        monkeypatch.setattr(f"gateway.responses.store.{name}", 7)
        with pytest.raises(openai.BadRequestError, match="conversation exceeds"):
            await create(gateway_app, previous_response_id=second.id)


async def test_the_quota_is_what_is_stored(valkey, tmp_path):
    gateway_app = await build(valkey, tmp_path, tenant_bytes=4000)
    store = ResponseStore(valkey)
    first = await create(gateway_app)
    size = await store.use("acme")
    fields = await valkey.hgetall(f"loralane:response:{{acme}}:{first.id}")
    stored = sum(len(fields[name]) for name in (b"head", b"input", b"output", b"ending"))
    assert 512 + stored == size
    made = [first]
    while await store.use("acme") + size <= 4000:
        made.append(await create(gateway_app))
        assert await store.use("acme") == size * len(made)
    await valkey.hset("loralane:response-charges:{acme}", "total", 4000)
    with pytest.raises(openai.RateLimitError, match="4000 bytes together; delete some") as refused:
        await create(gateway_app)
    assert (refused.value.code, refused.value.response.headers["x-should-retry"]) == ("insufficient_quota", "false")
    assert (await create(gateway_app, store=None)).to_dict()["store"] is False
    assert await store.use("initech") == 0
    await valkey.hset("loralane:response-charges:{acme}", "total", size * len(made))
    for response in made:
        assert (await ask(gateway_app, "DELETE", f"/{response.id}"))[0] == 200
    assert await store.use("acme") == 0
    await create(gateway_app)
    await gateway_app.assert_empty()


async def test_requests_at_once_do_not_exceed_the_quota(valkey, tmp_path):
    """Each found room when it began, and its answer is sent."""
    gateway_app = await build(valkey, tmp_path, tenant_bytes=4000)
    gateway_app.engine.go_on = asyncio.Event()
    creating = [asyncio.create_task(create(gateway_app)) for _ in range(6)]
    while len(gateway_app.engine.requests) < 6:
        await asyncio.sleep(0.001)
    gateway_app.engine.go_on.set()
    stored = [made.to_dict()["store"] for made in await asyncio.gather(*creating)]
    assert set(stored) == {True, False}
    assert await ResponseStore(valkey).use("acme") <= 4000
    await gateway_app.assert_empty()


async def test_what_would_be_stored_by_default_is_not_where_there_is_no_room(valkey, tmp_path):
    gateway_app = await build(valkey, tmp_path, "by_default", tenant_bytes=1)
    assert (await create(gateway_app, store=None)).to_dict()["store"] is False
    with pytest.raises(openai.RateLimitError):
        await create(gateway_app)


async def test_nothing_is_stored_on_a_disk_that_is_almost_full(valkey, tmp_path):
    """What must be stored is refused before it costs anything; deleting needs no room."""
    usage = SimpleNamespace(total=2**30, free=2**30)
    disk = Disk(tmp_path, measure=lambda folder: usage)
    responses = Responses(ResponseStore(valkey), "by_default", disk)
    gateway_app = await build_gateway_app(tmp_path, responses=responses)
    gateway_app.engine.info.max_model_len = 2048
    made = await create(gateway_app)
    usage.free = 2**29 - 1
    assert (await create(gateway_app, store=None)).to_dict()["store"] is False
    before = len(gateway_app.engine.requests)
    for fields in ({"store": True}, {"background": True}):
        with pytest.raises(openai.InternalServerError, match="almost full") as caught:
            await create(gateway_app, **fields)
        assert (caught.value.status_code, caught.value.code) == (507, "insufficient_storage")
    assert len(gateway_app.engine.requests) == before
    assert (await ask(gateway_app, "DELETE", f"/{made.id}"))[0] == 200
    await gateway_app.assert_empty()


async def test_responses_expire_and_are_refunded(valkey, tmp_path):
    gateway_app = await build(valkey, tmp_path, keep_seconds=0.05)
    store = ResponseStore(valkey)
    made = await create(gateway_app)
    assert await valkey.pttl(f"loralane:response:{{acme}}:{made.id}") <= 50
    while await valkey.keys("loralane:response*"):
        await asyncio.sleep(0.01)
    assert (await ask(gateway_app, "GET", f"/{made.id}"))[0] == 404
    with pytest.raises(openai.BadRequestError, match="has expired"):
        await create(gateway_app, previous_response_id=made.id)
    assert await store.use("acme") == 0


async def test_an_expired_response_is_refunded_while_others_stay(valkey):
    short, long = ResponseStore(valkey, StoreLimits(keep_seconds=0.03)), ResponseStore(valkey)
    await short.keep("acme", entry(1))
    await long.keep("acme", entry(2))
    while await valkey.exists(f"loralane:response:{{acme}}:{entry(1).id}"):
        await asyncio.sleep(0.01)
    assert await long.use("acme") == 512 + entry(2).num_bytes
    assert await valkey.zcard("loralane:response-ends:{acme}") == 1


def entry(number: int, previous: str = "") -> ResponseEntry:
    text = b'[{"role": "user", "content": "x"}]'
    return ResponseEntry(f"resp_{number:032x}", b'{"status": "completed"}', text, text, b"{}", previous, 2)


async def test_what_is_told_twice_is_charged_once(valkey):
    store = ResponseStore(valkey)
    for _ in range(2):
        await store.keep("acme", entry(1))
    assert await store.use("acme") == 512 + entry(1).num_bytes
    for number in range(2, 40):
        await store.keep("acme", entry(number, entry(number - 1).id))
    assert len((await store.history("acme", entry(39).id, None)).items) == 2 * 39


class AwayRedis:
    """A store whose calls fail from the moment that a test says."""

    def __init__(self, store: ResponseStore, monkeypatch: pytest.MonkeyPatch) -> None:
        async def away(*args: Any) -> Any:
            raise ApiError(Fault.REGISTRY_UNAVAILABLE, "stored responses are not available")

        monkeypatch.setattr(store, "_do", away)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_sent_even_if_it_cannot_be_stored(valkey, tmp_path, monkeypatch, stream):
    store = ResponseStore(valkey)
    gateway_app = await build_gateway_app(tmp_path, responses=Responses(store))
    gateway_app.engine.go_on = asyncio.Event()
    fields = {"stream": True} if stream else {}
    creating = asyncio.create_task(create(gateway_app, **fields))
    while not gateway_app.engine.requests:
        await asyncio.sleep(0.001)
    AwayRedis(store, monkeypatch)
    gateway_app.engine.go_on.set()
    made = await creating
    if stream:
        *_, last = [event async for event in made]
        made = last.response
    assert (made.output_text, made.status, made.to_dict()["store"]) == ("Hello, world!", "completed", False)
    await gateway_app.assert_empty()


async def test_without_redis_what_needs_it_is_refused(valkey, tmp_path, monkeypatch):
    store = ResponseStore(valkey)
    gateway_app = await build_gateway_app(tmp_path, responses=Responses(store, "by_default"))
    AwayRedis(store, monkeypatch)
    for fields in ({}, {"store": False, "previous_response_id": UNKNOWN}):
        with pytest.raises(openai.InternalServerError) as refused:
            await create(gateway_app, **fields)
        assert (refused.value.status_code, refused.value.code) == (503, "registry_unavailable")
    assert (await create(gateway_app, store=None)).to_dict()["store"] is False
    assert (await ask(gateway_app, "GET", f"/{UNKNOWN}"))[0] == 503


async def test_every_call_works_across_slots(cluster_ports):
    async with connect_cluster(f"redis://127.0.0.1:{cluster_ports[0]}") as client:
        await client.flushall()
        store = ResponseStore(client)
        for tenant in ("acme", "globex", "initech"):
            await store.keep(tenant, entry(1))
            await store.keep(tenant, entry(2, entry(1).id))
            assert len((await store.history(tenant, entry(2).id, 10)).items) == 4
            assert (await store.get(tenant, entry(1).id))["status"] == "completed"
            await store.delete(tenant, entry(1).id)
            assert await store.use(tenant) == 512 + entry(2).num_bytes
            await store.create(tenant, entry(3), streams=True)
            await store.renew(tenant, entry(3).id, "in_progress", 0, [b"event"])
            assert list((await store.events(tenant, entry(3).id, 0)).events) == [b"event"]
